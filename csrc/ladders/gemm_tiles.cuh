// Square tiles of x and w through shared memory, one element of the result a thread.
#pragma once

#include "gemm_loads.cuh"

namespace fusedops {

// Blocks of kTile x kTile threads; m, n and k are multiples of kTile. A row of a tile takes kPitch
// floats in shared memory.
template <int kTile, int kPitch>
__device__ __forceinline__ void multiply_tiles(const float* x, const float* w, float* out, int n,
                                               int k) {
  __shared__ float4 x_memory[kTile * kPitch / 4];  // float4: aligned to 16 bytes
  __shared__ float4 w_memory[kTile * kPitch / 4];
  const auto x_tile = reinterpret_cast<float (*)[kPitch]>(x_memory);
  const auto w_tile = reinterpret_cast<float (*)[kPitch]>(w_memory);
  const int tx = threadIdx.x;
  const int ty = threadIdx.y;
  const long long x_row = blockIdx.y * kTile + ty;
  const long long w_row = blockIdx.x * kTile + ty;
  float sum = 0.0f;
  for (int begin = 0; begin < k; begin += kTile) {
    x_tile[ty][tx] = load(&x[x_row * k + begin + tx]);
    w_tile[ty][tx] = load(&w[w_row * k + begin + tx]);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kTile; ++i) sum += x_tile[ty][i] * w_tile[tx][i];
    __syncthreads();  // every thread has read the tiles
  }
  out[x_row * n + blockIdx.x * kTile + tx] = sum;
}

}  // namespace fusedops
