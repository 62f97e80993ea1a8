// Idea: lanes pass their sums by shuffles, through registers; warps meet once, at one barrier.
// Wall: memory, at 89 %. Each load brings 4 bytes, so few bytes are in flight, and half a dozen
//   launches join the partial sums.
// Lever: 16 bytes a load, a grid that fits the GPU, and one step to join the blocks.

#include "shuffled_sum.cuh"

namespace fusedops {

constexpr int kThreads = 256;
constexpr int kElements = 8;

// Eight elements a thread; partial sums as in reduce_v1.
__global__ void reduce_v6(const float* x, float* partial, long long count) {
  const long long first = static_cast<long long>(blockIdx.x) * kElements * kThreads + threadIdx.x;
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < kElements; ++k) {
    const long long i = first + k * kThreads;
    if (i < count) sum += x[i];
  }
  sum = block_sum<kThreads>(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

}  // namespace fusedops
