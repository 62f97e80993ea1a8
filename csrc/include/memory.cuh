// Which load a kernel takes for 16 bytes that it uses once. Times are of an H200, where both are
// measured against `ld.global.nc.L1::no_allocate.L2::256B`, which asks for the neighbourhood early.
//
// Stores have no hint. Where evict-first stores gain anything, load_cached gains as much (rms_norm
// 66.2 and 66.1 us), and a result of a small call must stay in the L2 for the kernel that comes
// next.
#pragma once

namespace fusedops {

// For kernels that hardly write: past the L1 (PTX ISA, "ld.global.nc"). 1 GiB of float32 rows are
// summed in 234.6 us instead of 250.1, columns in 242.2 instead of 248.7. Nothing that the kernel
// itself writes may be read so. Volatile, so that it stays behind a preceding pdl_wait().
__device__ __forceinline__ uint4 load_stream(const void* address) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address));
  return value;
}

// For kernels that write about as much as they read: by way of the L1, as any load. rms_norm of
// 16384 x 4096 bfloat16 takes 66.1 us instead of 69.9, with a residual 132.2 instead of 139.4, a
// copy of 2 GiB 1003 instead of 1034. Vectors whose sectors neighbouring threads share need the L1
// (shifted transposes: 151 us, 178 past it). In place kernels may use it; volatile as above.
__device__ __forceinline__ uint4 load_cached(const void* address) {
  uint4 value;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address));
  return value;
}

// 16 bytes at once. The compiler takes plain stores of vectors that were put together from elements
// apart again. What it writes, the kernel must not read.
__device__ __forceinline__ void store_vector(void* address, const uint4& value) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(value.x),
               "r"(value.y), "r"(value.z), "r"(value.w));
}

}  // namespace fusedops
