// Instructions whose results are near, not rounded (PTX ISA, "rcp.approx").
#pragma once

namespace fusedops {

// 1 / x with 1 ulp; subnormal numbers count as 0.
__device__ __forceinline__ float reciprocal_approximate(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

}  // namespace fusedops
