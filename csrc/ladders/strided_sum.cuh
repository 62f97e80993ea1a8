// A thread's share of a sum: vectors of 16 bytes, a grid apart, four of them under way at once.
#pragma once

#include "memory.cuh"

namespace fusedops {

constexpr int kLoads = 4;
constexpr int kBlocksPerSm = 8;  // with four vectors in registers, all of a grid that fits the GPU

__device__ __forceinline__ float strided_sum(const float* x, long long count) {
  const uint4* vectors = reinterpret_cast<const uint4*>(x);
  const long long threads = static_cast<long long>(gridDim.x) * blockDim.x;
  const long long thread = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  float sum = 0.0f;
#pragma unroll 1
  for (long long i = thread; i < count / 4; i += kLoads * threads) {
    uint4 bits[kLoads] = {};
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      if (i + u * threads < count / 4) bits[u] = load_stream(vectors + i + u * threads);
    }
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      sum += (__uint_as_float(bits[u].x) + __uint_as_float(bits[u].y)) +
             (__uint_as_float(bits[u].z) + __uint_as_float(bits[u].w));
    }
  }
  const long long tail = count / 4 * 4 + thread;
  return tail < count ? sum + x[tail] : sum;
}

}  // namespace fusedops
