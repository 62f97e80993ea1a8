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

// Lets the next kernel's thread blocks start as soon as there is room for them. Kernels of rows
// call it behind their wait: called at the start, it lets two grids wait on the SMs while the one
// ahead still works, and rms_norm of 64 x 4096 in a chain of its like takes 1.69 us instead of 1.30
// (of 16 rows 1.07 instead of 1.25, H200).
__device__ __forceinline__ void pdl_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace fusedops
