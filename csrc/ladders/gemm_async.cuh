// Copies of 16 bytes from global to shared memory that take no registers and no waiting (PTX ISA,
// "cp.async"), and slabs that take turns in two buffers.
#pragma once

#include "gemm_loads.cuh"
#include "gemm_slab.cuh"

namespace fusedops {

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

template <class Vec>
__device__ __forceinline__ void fetch_slab(Slab<Vec>& slab, const Vec* x, const Vec* w, int vecs,
                                           int step, int values_a_vector) {
  fill_slab(slab, x, w, vecs, step, [values_a_vector](Vec* to, const Vec* from) {
    count_loads(values_a_vector);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from)
                 : "memory");
  });
}

// Calls `use` with every slab in order, while the next one is on its way.
template <int kValues, class Vec, class Use>
__device__ __forceinline__ void for_each_slab(Slab<Vec> (&slabs)[2], const Vec* x, const Vec* w,
                                              int k, const Use& use) {
  const int vecs = k / kValues;
  const int steps = vecs / kVecs;
  fetch_slab(slabs[0], x, w, vecs, 0, kValues);
  asm volatile("cp.async.commit_group;" ::: "memory");
  for (int step = 0; step < steps; ++step) {
    if (step + 1 < steps) fetch_slab(slabs[(step + 1) % 2], x, w, vecs, step + 1, kValues);
    asm volatile("cp.async.commit_group;" ::: "memory");
    asm volatile("cp.async.wait_group 1;" ::: "memory");  // all but the newest have come
    __syncthreads();
    use(slabs[step % 2]);
    __syncthreads();  // every thread has read the slab
  }
}

}  // namespace fusedops
