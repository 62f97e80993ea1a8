// Idea: several elements a thread, summed in a register before the tree begins. There is a
//   sweet spot: with few the tree takes its share, with many there are fewer blocks than
//   multiprocessors.
// Wall: memory with 8 and 64 elements (91 and 94 % of its rate on an H200), latency with 8192: 128
//   blocks leave some of 132 multiprocessors without work and the others with one block.
// Lever: replace the tree by shuffles within the warp, so that few elements are enough.

namespace fusedops {

constexpr int kThreads = 256;

// kElements a thread; partial sums as in reduce_v1.
template <int kElements>
__global__ void reduce_v5(const float* x, float* partial, long long count) {
  __shared__ float held[kThreads];
  const int t = threadIdx.x;
  const long long first = static_cast<long long>(blockIdx.x) * kElements * kThreads + t;
  float sum = 0.0f;
#pragma unroll 8
  for (int k = 0; k < kElements; ++k) {
    const long long i = first + static_cast<long long>(k) * kThreads;
    if (i < count) sum += x[i];
  }
  held[t] = sum;
  __syncthreads();
  for (int distance = kThreads / 2; distance > 0; distance /= 2) {
    if (t < distance) held[t] += held[t + distance];
    __syncthreads();
  }
  if (t == 0) partial[blockIdx.x] = held[0];
}

}  // namespace fusedops
