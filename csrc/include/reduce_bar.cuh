// Which batches of a row are looked into for the position of its extremum.
//
// Of 64 rows of 128,256 float32 (H200), max takes 9.83 us and argmax, which followed the position
// from element to element, 11.46; out of the L2 6.18 and 7.93. But a position matters only in a
// batch that no other one of the row beats. In random data those are few; where each is better than
// all before, every one is looked into, as without a bar: the bar costs half an instruction an
// element (a batch of 32; 16 narrow ones: one), where fold itself costs three or more.
#pragma once

#include "reduce_ops.cuh"

namespace fusedops {

// Orders values by 32 bits: a larger rank is a larger value. Equal values (-0 and 0 are) have one
// rank, as do 64-bit ones that begin with the same 32 bits.
__device__ __forceinline__ unsigned rank_of(int value) {
  return static_cast<unsigned>(value) ^ 0x80000000u;
}
__device__ __forceinline__ unsigned rank_of(long long value) {
  return rank_of(static_cast<int>(value >> 32));
}
// The bits of floats below zero grow with the magnitude; -0 + 0 is 0.
__device__ __forceinline__ unsigned rank_of_bits(int bits) {
  return rank_of(bits < 0 ? bits ^ 0x7fffffff : bits);
}
__device__ __forceinline__ unsigned rank_of(float value) {
  return rank_of_bits(__float_as_int(value + 0.0f));
}
__device__ __forceinline__ unsigned rank_of(double value) {
  return rank_of_bits(__double2hiint(value + 0.0));
}

struct NoBar {
  template <typename T, int kCount>
  __device__ __forceinline__ bool admits(const T (&)[kCount]) const {
    return true;
  }
};

// The bar of a block that works on one row; for most operations every batch counts.
template <class Op>
struct Bar : NoBar {
  static __device__ __forceinline__ Bar of_block() { return Bar(); }
};

template <typename T, bool kLargest>
struct Bar<Arg<T, kLargest>> {
  // The highest rank that the block has met, or an earlier one, which only admits more.
  unsigned* highest;

  // A value of a lower rank than any other one's is not the extremum.
  static __device__ __forceinline__ unsigned rank(Wide<T> value) {
    if (value != value) return 0xffffffffu;
    return kLargest ? rank_of(value) : ~rank_of(value);
  }

  // A bar in shared memory that admits all. Every thread of the block must call it.
  static __device__ __forceinline__ Bar of_block() {
    __shared__ unsigned highest;
    if (threadIdx.x == 0) highest = 0;
    __syncthreads();
    return {&highest};
  }

  // Whether the row's extremum may be in the batch: not where a value of a higher rank was met.
  // That one's own batch is admitted, as are those of values that tie with it.
  template <int kCount>
  __device__ __forceinline__ bool admits(const T (&values)[kCount]) const {
    const unsigned own = rank(Arg<T, kLargest>::Extremum::fold(values));
    const unsigned seen = *static_cast<volatile unsigned*>(highest);
    // One atomic a warp: the compiler joins its lanes first (REDUX).
    if (own > seen) atomicMax(highest, own);
    return own >= seen;
  }
};

}  // namespace fusedops
