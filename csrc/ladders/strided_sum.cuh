// A thread's share of a sum: vectors of 16 bytes, a grid apart, four of them under way at once.
#pragma once

namespace fusedops {

__device__ __forceinline__ float strided_sum(const float* x, long long count) {
  const float4* vectors = reinterpret_cast<const float4*>(x);
  const long long threads = static_cast<long long>(gridDim.x) * blockDim.x;
  const long long thread = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  float sum = 0.0f;
#pragma unroll 4
  for (long long i = thread; i < count / 4; i += threads) {
    const float4 value = vectors[i];
    sum += (value.x + value.y) + (value.z + value.w);
  }
  const long long tail = count / 4 * 4 + thread;
  return tail < count ? sum + x[tail] : sum;
}

}  // namespace fusedops
