// Idea: asynchronous copies and double buffering. The next slab is copied into a second buffer
//   while this one is multiplied.
// Wall: FMA pipe, 60 % busy. The multiply-adds are what is left; cuBLAS, which loads less from
//   shared memory and holds more in registers, keeps it busy for 79 %.
// Lever: tensor cores: one instruction of a warp multiplies 16 x 8 x 16.

#include "gemm_async.cuh"
#include "gemm_micro.cuh"

namespace fusedops {

// As gemm_v4.
__global__ void __launch_bounds__(kThreads, 2)
    gemm_v5(const float4* x, const float4* w, float* out, int n, int k) {
  __shared__ Slab<float4> slabs[2];
  Micro micro;
  for_each_slab<4>(slabs, x, w, k, [&](const Slab<float4>& slab) { add_slab(micro, slab); });
  store_micro(micro, out, n);
}

}  // namespace fusedops
