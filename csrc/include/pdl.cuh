// Programmatic dependent launch (PTX ISA, "griddepcontrol"): a kernel may start while the one ahead
// of it in the stream still runs. Launched without the attribute, a kernel is not affected.
#pragma once

namespace fusedops {

// Waits until the grids this one depends on have finished and their writes are visible. Every block
// must execute it before it exits and before it touches anything that an earlier kernel writes.
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel's thread blocks start as soon as there is room for them: they wait in turn,
// but not for their launch, and what they read ahead (a GEMM's first weights) overlaps this kernel.
// A GEMM with one block an SM enters an SM when the one before it leaves it. So kernels call it at
// their entry, except that many rows in a chain of kernels of rows get into each other's way, since
// two grids then wait on the SMs while one works: beyond 48 rows it is called behind the wait. us
// of rms_norm (H200, 4096 bfloat16 a row), called at the entry and behind the wait:
//
//   rows               1             16            32            48            64
//   chain of norms     1.01  1.16    1.07  1.24    1.57  1.29    1.16  1.29    1.70  1.31
//   16 MB copy, norm   10.26 10.39   10.36 10.48                               10.50 10.67
__device__ __forceinline__ void pdl_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The two places of that call in a kernel of rows, which its layout chooses from.
template <class Layout>
__device__ __forceinline__ void pdl_enter() {
  if constexpr (Layout::kIsEarly) pdl_launch_dependents();
}

template <class Layout>
__device__ __forceinline__ void pdl_wait_for_rows() {
  pdl_wait();
  if constexpr (!Layout::kIsEarly) pdl_launch_dependents();
}

}  // namespace fusedops
