// Activation functions on float, by the names of fusedops.epilogue.activations. kPrecise: for
// results that stay float, to an ulp or two; otherwise for results rounded to 16 bits, with the
// approximate exponential and reciprocal: 2^-21 relative, and 0 where a sigmoid lies below 2^-126.
#pragma once

#include "approximate.cuh"
#include "ptx.cuh"

namespace fusedops {

// x * sigmoid(argument).
template <bool kPrecise>
__device__ __forceinline__ float times_sigmoid(float x, float argument) {
  if constexpr (kPrecise) {
    return x / (1.0f + expf(-argument));
  } else {
    return x * reciprocal_approximate(1.0f + exp2_approximate(argument * -1.4426950408889634f));
  }
}

struct Identity {
  template <bool kPrecise>
  static __device__ __forceinline__ float of(float x) {
    return x;
  }
};

struct Relu {
  template <bool kPrecise>
  static __device__ __forceinline__ float of(float x) {
    return x <= 0.0f ? 0.0f : x;  // a NaN stays
  }
};

struct Relu2 {
  template <bool kPrecise>
  static __device__ __forceinline__ float of(float x) {
    return x <= 0.0f ? 0.0f : x * x;
  }
};

struct Gelu {
  template <bool kPrecise>
  static __device__ __forceinline__ float of(float x) {
    return x * 0.5f * (1.0f + erff(x * 0.70710678118654752f));
  }
};

struct GeluTanh {
  template <bool kPrecise>
  static __device__ __forceinline__ float of(float x) {
    const float inner = 0.79788456080286536f * (x + 0.044715f * (x * x * x));
    if constexpr (kPrecise) {
      return 0.5f * x * (1.0f + tanhf(inner));
    } else {
      // (1 + tanh(u)) / 2 is the sigmoid of 2 u.
      return times_sigmoid<false>(x, 2.0f * inner);
    }
  }
};

struct Silu {
  template <bool kPrecise>
  static __device__ __forceinline__ float of(float x) {
    return times_sigmoid<kPrecise>(x, x);
  }
};

struct QuickGelu {
  template <bool kPrecise>
  static __device__ __forceinline__ float of(float x) {
    if constexpr (kPrecise) {
      return x * (1.0f / (1.0f + expf(-1.702f * x)));
    } else {
      return times_sigmoid<false>(x, 1.702f * x);
    }
  }
};

struct Sigmoid {
  template <bool kPrecise>
  static __device__ __forceinline__ float of(float x) {
    if constexpr (kPrecise) {
      return 1.0f / (1.0f + expf(-x));
    } else {
      return reciprocal_approximate(1.0f + exp2_approximate(x * -1.4426950408889634f));
    }
  }
};

}  // namespace fusedops
