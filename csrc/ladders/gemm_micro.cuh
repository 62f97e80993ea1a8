// Micro-tiles in registers: a thread's 8 rows and 8 columns of a tile of 128 x 128, 16 apart.
#pragma once

#include "gemm_slab.cuh"

namespace fusedops {

constexpr int kMicro = 8;
constexpr int kApart = kTile / kMicro;

struct Micro {
  float sum[kMicro][kMicro] = {};
};

// Adds what a slab gives: 16 loads of 16 bytes for 256 multiply-adds.
__device__ __forceinline__ void add_slab(Micro& micro, const Slab<float4>& slab) {
  const int row = threadIdx.x / kApart;
  const int column = threadIdx.x % kApart;
#pragma unroll 1  // more at once spills registers
  for (int q = 0; q < kVecs; ++q) {
    float4 a[kMicro];
#pragma unroll
    for (int i = 0; i < kMicro; ++i) a[i] = slab.x[row + i * kApart][q];
#pragma unroll
    for (int j = 0; j < kMicro; ++j) {
      const float4 b = slab.w[column + j * kApart][q];
#pragma unroll
      for (int i = 0; i < kMicro; ++i) {
        float& sum = micro.sum[i][j];
        sum = fmaf(a[i].x, b.x, sum);
        sum = fmaf(a[i].y, b.y, sum);
        sum = fmaf(a[i].z, b.z, sum);
        sum = fmaf(a[i].w, b.w, sum);
      }
    }
  }
}

__device__ __forceinline__ void store_micro(const Micro& micro, float* out, int n) {
  const int row = blockIdx.y * kTile + threadIdx.x / kApart;
  const int column = blockIdx.x * kTile + threadIdx.x % kApart;
#pragma unroll
  for (int i = 0; i < kMicro; ++i) {
#pragma unroll
    for (int j = 0; j < kMicro; ++j) {
      out[(1ll * row + i * kApart) * n + column + j * kApart] = micro.sum[i][j];
    }
  }
}

}  // namespace fusedops
