// Neighbouring elements that are read and written at once, and rounded arithmetic on them.
#pragma once

#include "convert.cuh"
#include "memory.cuh"

namespace fusedops {

// Elements of 16 bits stay in 32-bit words, two a register: the compiler would give each a register
// of its own, which halves the rows in flight.
template <typename T, int kWidth>
constexpr bool kIsPaired = sizeof(T) == 2 && kWidth >= 2;

template <typename T, int kWidth>
constexpr int kPackAlignment = sizeof(T) * kWidth < 16 ? static_cast<int>(sizeof(T)) * kWidth : 16;

template <typename T, int kWidth, bool kPaired = kIsPaired<T, kWidth>>
struct alignas(kPackAlignment<T, kWidth>) Pack {
  T data[kWidth];
};

template <typename T, int kWidth>
struct alignas(kPackAlignment<T, kWidth>) Pack<T, kWidth, true> {
  unsigned words[kWidth / 2];
};

// Two 16-bit floats in one word.
template <typename T>
struct PairOf;
template <>
struct PairOf<__half> {
  using type = __half2;
  static __device__ __forceinline__ __half2 rounded(float low, float high) {
    return __floats2half2_rn(low, high);
  }
  static __device__ __forceinline__ float2 widened(__half2 pair) { return __half22float2(pair); }
};
template <>
struct PairOf<__nv_bfloat16> {
  using type = __nv_bfloat162;
  static __device__ __forceinline__ __nv_bfloat162 rounded(float low, float high) {
    return __floats2bfloat162_rn(low, high);
  }
  static __device__ __forceinline__ float2 widened(__nv_bfloat162 pair) {
    return __bfloat1622float2(pair);
  }
};

template <typename To, typename From>
__device__ __forceinline__ To same_bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "of one size");
  union Bits {
    From from;
    To to;
    __device__ __forceinline__ Bits() {}
  } bits;
  bits.from = from;
  return bits.to;
}

template <typename T>
__device__ __forceinline__ typename PairOf<T>::type pair_of(unsigned word) {
  return same_bits<typename PairOf<T>::type>(word);
}

template <typename T, int kWidth>
__device__ __forceinline__ void widen(const Pack<T, kWidth>& pack, float (&values)[kWidth]) {
  if constexpr (kIsPaired<T, kWidth>) {
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) {
      const float2 pair = PairOf<T>::widened(pair_of<T>(pack.words[i]));
      values[2 * i] = pair.x;
      values[2 * i + 1] = pair.y;
    }
  } else {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) values[j] = to_float(pack.data[j]);
  }
}

// Each value rounded to T.
template <typename T, int kWidth>
__device__ __forceinline__ Pack<T, kWidth> rounded(const float (&values)[kWidth]) {
  Pack<T, kWidth> pack;
  if constexpr (kIsPaired<T, kWidth>) {
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) {
      pack.words[i] = same_bits<unsigned>(PairOf<T>::rounded(values[2 * i], values[2 * i + 1]));
    }
  } else {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) pack.data[j] = from_float<T>(values[j]);
  }
  return pack;
}

template <typename T, int kWidth>
__device__ __forceinline__ Pack<T, kWidth> filled_pack(float value) {
  float values[kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) values[j] = value;
  return rounded<T, kWidth>(values);
}

// Makes the compiler widen a pack anew where it is used next, instead of keeping the floats of the
// last use in registers meanwhile, which are twice as many.
template <typename T, int kWidth>
__device__ __forceinline__ void forget_widened(Pack<T, kWidth>& pack) {
  if constexpr (kIsPaired<T, kWidth>) {
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) asm volatile("" : "+r"(pack.words[i]));
  }
}

// Pack number `index` of a row whose elements lie `inner` apart; more than one element a pack only
// where they lie side by side, at a multiple of the pack's size (at most 16 bytes).
template <typename T, int kWidth>
__device__ __forceinline__ Pack<T, kWidth> load_pack(const T* row, long long index,
                                                     long long inner) {
  Pack<T, kWidth> pack;
  if constexpr (kWidth == 1) {
    pack.data[0] = row[index * inner];
  } else if constexpr (sizeof(pack) == 16) {
    pack = same_bits<Pack<T, kWidth>>(load_cached(row + index * kWidth));
  } else {
    pack = *reinterpret_cast<const Pack<T, kWidth>*>(row + index * kWidth);
  }
  return pack;
}

template <typename T, int kWidth>
__device__ __forceinline__ void store_pack(T* row, long long index, long long inner,
                                           const Pack<T, kWidth>& pack) {
  if constexpr (kWidth == 1) {
    row[index * inner] = pack.data[0];
  } else {
    *reinterpret_cast<Pack<T, kWidth>*>(row + index * kWidth) = pack;
  }
}

// a + b, rounded once to T.
template <typename T, int kWidth>
__device__ __forceinline__ Pack<T, kWidth> rounded_sum(const Pack<T, kWidth>& a,
                                                       const Pack<T, kWidth>& b) {
  Pack<T, kWidth> sum;
  if constexpr (kIsPaired<T, kWidth>) {
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) {
      sum.words[i] = same_bits<unsigned>(__hadd2(pair_of<T>(a.words[i]), pair_of<T>(b.words[i])));
    }
  } else {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      sum.data[j] = from_float<T>(to_float(a.data[j]) + to_float(b.data[j]));
    }
  }
  return sum;
}

// a * b, rounded once to T.
template <typename T, int kWidth>
__device__ __forceinline__ Pack<T, kWidth> rounded_product(const Pack<T, kWidth>& a,
                                                           const Pack<T, kWidth>& b) {
  Pack<T, kWidth> product;
  if constexpr (kIsPaired<T, kWidth>) {
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) {
      product.words[i] =
          same_bits<unsigned>(__hmul2(pair_of<T>(a.words[i]), pair_of<T>(b.words[i])));
    }
  } else {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      product.data[j] = from_float<T>(to_float(a.data[j]) * to_float(b.data[j]));
    }
  }
  return product;
}

// The bits of the largest magnitude as a float. Of floats without a sign the bits compare like the
// values, and those of a NaN are larger than those of infinity, so that an unsigned maximum keeps
// it.
template <typename T, int kWidth>
__device__ __forceinline__ unsigned magnitude_bits(const Pack<T, kWidth>& pack) {
  if constexpr (kIsPaired<T, kWidth>) {
    auto largest = __habs2(pair_of<T>(pack.words[0]));
#pragma unroll
    for (int i = 1; i < kWidth / 2; ++i) {
      largest = __hmax2_nan(largest, __habs2(pair_of<T>(pack.words[i])));
    }
    const float2 pair = PairOf<T>::widened(largest);
    return max(__float_as_uint(pair.x), __float_as_uint(pair.y));
  } else {
    unsigned largest = 0;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      largest = max(largest, __float_as_uint(to_float(pack.data[j])) & 0x7fffffffu);
    }
    return largest;
  }
}

}  // namespace fusedops
