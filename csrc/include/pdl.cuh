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

// Lets the next kernel's thread blocks start as soon as there is room for them.
__device__ __forceinline__ void pdl_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace fusedops
