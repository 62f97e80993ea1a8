// Idea: micro-tiles of 8 x 8 in the registers of a thread, so that a value from shared memory
//   serves eight multiply-adds, and tiles of 128 x 128: MNK / 64 loads in all.
// Wall: latency. The block loads, waits, computes and waits again: nothing computes while the next
//   slab is on its way, and the copy itself passes through registers. Neither the FMA pipe nor the
//   load units reach 60 %, with 16 warps a multiprocessor to hide it.
// Lever: copies that go to shared memory by themselves, one slab ahead.

#include "gemm_loads.cuh"
#include "gemm_micro.cuh"

namespace fusedops {

// x and w as vectors of 4; m and n are multiples of 128, k of 16.
__global__ void __launch_bounds__(kThreads, 2)
    gemm_v4(const float4* x, const float4* w, float* out, int n, int k) {
  __shared__ Slab<float4> slab;
  Micro micro;
  const auto copy = [](float4* to, const float4* from) { *to = load(from); };
  for (int step = 0; step < k / (4 * kVecs); ++step) {
    fill_slab(slab, x, w, k / 4, step, copy);
    __syncthreads();
    add_slab(micro, slab);
    __syncthreads();  // every thread has read the slab
  }
  store_micro(micro, out, n);
}

}  // namespace fusedops
