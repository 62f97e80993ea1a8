// Idea: one thread an element of the result walks a row of x and a row of w.
// Wall: load units, 99 % busy. Two loads for every multiply-add, 2 MNK in all; and neighbouring
//   threads read neighbouring rows of w, so that a load of w takes 32 sectors, one after the other,
//   for 32 values.
// Lever: load a tile once for the whole block, with neighbouring threads along the rows, and let
//   every thread of the block read it from shared memory.

#include "gemm_loads.cuh"

namespace fusedops {

// out (m, n) = x (m, k) times the transpose of w (n, k), row by row in memory. Blocks of 32 x 8
// threads; n and m are multiples of that.
__global__ void __launch_bounds__(256)
    gemm_v1(const float* x, const float* w, float* out, int n, int k) {
  const long long column = blockIdx.x * 32 + threadIdx.x;
  const long long row = blockIdx.y * 8 + threadIdx.y;
  float sum = 0.0f;
  for (int i = 0; i < k; ++i) sum += load(&x[row * k + i]) * load(&w[column * k + i]);
  out[row * n + column] = sum;
}

}  // namespace fusedops
