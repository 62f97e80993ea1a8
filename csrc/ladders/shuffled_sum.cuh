// A block's sum with one barrier: shuffles within the warps, then one warp over their sums.
#pragma once

namespace fusedops {

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    value += __shfl_down_sync(0xffffffffu, value, offset);
  }
  return value;
}

// Every thread of the block calls it; thread 0 gets the sum.
template <int kThreads>
__device__ __forceinline__ float block_sum(float value) {
  __shared__ float of_warp[kThreads / 32];
  value = warp_sum(value);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  if (threadIdx.x >= 32) return 0.0f;
  return warp_sum(threadIdx.x < kThreads / 32 ? of_warp[threadIdx.x] : 0.0f);
}

}  // namespace fusedops
