// Idea: tensor cores. x and w are bfloat16, a warp holds 64 x 32 of the result, and mma.sync
//   multiplies pieces of 16 x 8 x 16 that ldmatrix brings from the slab into registers.
// Wall: latency. One slab ahead is too little for cores this fast, every warp waits at two barriers
//   a slab, and the operands take instructions and registers on their way.
// Lever: the copy engine (TMA) fills a deep ring for one warp's asking, and wgmma reads its
//   operands from shared memory by itself, four warps together.

#include <cuda_bf16.h>

#include "gemm_async.cuh"

namespace fusedops {

constexpr int kValues = 8;        // of a vector
constexpr int kWarpRows = 64;     // two warps share the rows of a tile,
constexpr int kWarpColumns = 32;  // four its columns

// Four matrices of 8 x 8; lane l gives the address of row l % 8 of matrix l / 8. PTX ISA,
// "ldmatrix".
__device__ __forceinline__ void load_matrices(unsigned (&to)[4], const uint4* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}

// sum += a b for 16 x 16 of x and the transpose of 8 x 16 of w. PTX ISA, "mma.m16n8k16".
__device__ __forceinline__ void multiply_add(float (&sum)[4], const unsigned (&a)[4], unsigned b0,
                                             unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// x and w as vectors of 8; m and n are multiples of 128, k of 32.
__global__ void __launch_bounds__(kThreads, 2)
    gemm_v6(const uint4* x, const uint4* w, __nv_bfloat162* out, int n, int k) {
  __shared__ Slab<uint4> slabs[2];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int row = warp / 4 * kWarpRows;
  const int column = warp % 4 * kWarpColumns;
  float sum[4][4][4] = {};  // 16 rows, 8 columns, and four elements of those a lane
  for_each_slab<kValues>(slabs, x, w, k, [&](const Slab<uint4>& slab) {
#pragma unroll
    for (int q = 0; q < kVecs; q += 2) {  // 16 of k are two vectors
      unsigned a[4][4];
      unsigned b[2][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        load_matrices(a[i], &slab.x[row + 16 * i + lane % 16][q + lane / 16]);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        load_matrices(b[j], &slab.w[column + 16 * j + lane / 16 * 8 + lane % 8][q + lane / 8 % 2]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          multiply_add(sum[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
  });
  const long long first_row = blockIdx.y * kTile + row + lane / 4;
  const int pair = (blockIdx.x * kTile + column) / 2 + lane % 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float (&each)[4] = sum[i][j];
      const long long top = (first_row + 16 * i) * (n / 2) + pair + 4 * j;
      out[top] = __floats2bfloat162_rn(each[0], each[1]);
      out[top + 4ll * n] = __floats2bfloat162_rn(each[2], each[3]);  // eight rows below
    }
  }
}

}  // namespace fusedops
