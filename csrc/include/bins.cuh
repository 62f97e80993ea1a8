// Which bin an element belongs to: what histograms count, one struct a kind of elements.
//
//   Element        the element type.
//   bin(element)   0 .. bins - 1, or `bins` for an element that is not counted.
#pragma once

#include "convert.cuh"

namespace fusedops {

// Parameters of every struct; those of ranges are bits of doubles, since launches hold integers.
struct BinSpec {
  int bins;
  long long lo;
  long long hi;
  long long step;
  long long scale;
  long long slack;
};

// An integer is its own bin.
template <typename T>
struct IndexBins {
  using Element = T;
  int bins;

  __device__ explicit IndexBins(const BinSpec& spec) : bins(spec.bins) {}
  __device__ __forceinline__ int bin(T value) const {
    if constexpr (sizeof(T) == 8) {
      return static_cast<int>(
          min(static_cast<unsigned long long>(value), static_cast<unsigned long long>(bins)));
    } else {
      return static_cast<int>(min(static_cast<unsigned>(value), static_cast<unsigned>(bins)));
    }
  }
};

template <typename T>
struct ComparedOf {
  using type = float;
};
template <>
struct ComparedOf<double> {
  using type = double;
};

__device__ __forceinline__ double compared(double value) { return value; }
__device__ __forceinline__ float compared(float value) { return value; }
__device__ __forceinline__ float compared(__half value) { return __half2float(value); }
__device__ __forceinline__ float compared(__nv_bfloat16 value) { return __bfloat162float(value); }

// Rounded towards zero; what is too large becomes the largest int, NaN 0 or the smallest.
__device__ __forceinline__ int whole(float value) { return __float2int_rz(value); }
__device__ __forceinline__ int whole(double value) { return __double2int_rz(value); }

// Bins of equal width. Bin i holds edge(i) <= sample < edge(i + 1), the last one also its end; the
// edges are those of the operation's docstring, to the bit. A product guesses the bin; only where
// it lies within `slack` of a whole number can rounding have led astray, and edges are compared.
template <typename T>
struct RangeBins {
  using Element = T;
  using Real = typename ComparedOf<T>::type;
  int bins;
  double from, step;
  Real lo, hi, scale, slack;

  __device__ explicit RangeBins(const BinSpec& spec)
      : bins(spec.bins),
        from(__longlong_as_double(spec.lo)),
        step(__longlong_as_double(spec.step)),
        lo(static_cast<Real>(__longlong_as_double(spec.lo))),
        hi(static_cast<Real>(__longlong_as_double(spec.hi))),
        scale(static_cast<Real>(__longlong_as_double(spec.scale))),
        slack(static_cast<Real>(__longlong_as_double(spec.slack))) {}

  // Both operations are rounded, as everywhere: no fused multiply-add.
  __device__ __forceinline__ Real edge(int index) const {
    return static_cast<Real>(__dadd_rn(from, __dmul_rn(static_cast<double>(index), step)));
  }

  // The last bin whose edge is not above the sample, between the bins `first` and `last`.
  __device__ __forceinline__ int searched(Real sample, int first, int last) const {
#pragma unroll 1
    while (first < last) {
      const int middle = (first + last + 1) / 2;
      if (edge(middle) <= sample) {
        first = middle;
      } else {
        last = middle - 1;
      }
    }
    return first;
  }

  __device__ __forceinline__ int bin(T value) const {
    const Real sample = compared(value);
    if (!(sample >= lo && sample <= hi)) return bins;  // NaN too
    const Real place = (sample - lo) * scale;
    const int guess = whole(place);
    const Real rest = place - static_cast<Real>(guess);
    if (rest > slack && rest < Real(1) - slack && guess < bins) return guess;
    int first = max(min(guess, bins), 1) - 1;
    int last = min(first + 2, bins - 1);
    if (first > 0 && !(edge(first) <= sample)) first = 0;
    if (last < bins - 1 && !(sample < edge(last + 1))) last = bins - 1;
    return searched(sample, first, last);
  }
};

}  // namespace fusedops
