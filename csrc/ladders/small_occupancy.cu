// Idea: what a block takes of registers and shared memory sets how many warps a multiprocessor
//   holds. __launch_bounds__ asks for more blocks with fewer registers; the carve-out splits a
//   multiprocessor's memory between shared memory and the L1 cache.
// Wall: latency. With one load under way a thread, the rate grows with the warps (Little's law:
//   bytes under way are rate times latency) until the memory is full.
// Lever: enough warps, or more under way a thread. Past that point occupancy buys nothing, and
//   registers that spill to memory cost more than the warps bring.

namespace fusedops {

constexpr int kThreads = 256;
constexpr int kValues = 48;

// Each value needs its neighbour in every round: all of them are alive all the time. x is
// (kValues, count).
template <int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks)
    small_registers(const float* x, float* out, int rounds, int count) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= count) return;
  float values[kValues];
#pragma unroll
  for (int j = 0; j < kValues; ++j) values[j] = x[static_cast<long long>(j) * count + i];
  for (int round = 0; round < rounds; ++round) {
#pragma unroll
    for (int j = 0; j < kValues; ++j) {
      values[j] = fmaf(values[j], 0.5f, 0.5f * values[(j + 1) % kValues]);
    }
  }
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < kValues; ++j) sum += values[j];
  out[i] = sum;
}

// One load under way a thread. A launch asks for shared memory only to be given fewer blocks.
__global__ void __launch_bounds__(kThreads)
    small_one_load(const float* x, float* out, long long count) {
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  const long long first = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  float sum = 0.0f;
#pragma unroll 1
  for (long long i = first; i < count; i += step) sum += x[i];
  out[first] = sum;
}

}  // namespace fusedops
