// 256 bins in shared memory, in one or several copies; every thread of the block calls these.
#pragma once

namespace fusedops {

constexpr int kBins = 256;

__device__ __forceinline__ void clear_bins(unsigned* bins, int copies) {
  for (int i = threadIdx.x; i < copies * kBins; i += blockDim.x) bins[i] = 0;
  __syncthreads();
}

// Adds the sum of the copies to global memory: one atomic a bin and block, none for empty bins.
__device__ __forceinline__ void flush_bins(const unsigned* bins, int copies, unsigned* counts) {
  __syncthreads();
  for (int bin = threadIdx.x; bin < kBins; bin += blockDim.x) {
    unsigned sum = 0;
    for (int copy = 0; copy < copies; ++copy) sum += bins[copy * kBins + bin];
    if (sum != 0) atomicAdd(&counts[bin], sum);
  }
}

// Byte `k` of 16 that were loaded at once; `k` known at compile time.
__device__ __forceinline__ unsigned byte_of(const uint4& vector, int k) {
  const unsigned word = k < 4 ? vector.x : k < 8 ? vector.y : k < 12 ? vector.z : vector.w;
  return (word >> (k % 4 * 8)) & 0xffu;
}

// The bytes past the last whole vector, counted by the first threads of the first block.
__device__ __forceinline__ void count_tail(const unsigned char* x, long long count,
                                           unsigned* bins) {
  const long long i = count / 16 * 16 + threadIdx.x;
  if (blockIdx.x == 0 && i < count) atomicAdd(&bins[x[i]], 1u);
}

}  // namespace fusedops
