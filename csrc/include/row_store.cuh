// How a row's results are stored: as they are, or as 8 bits with float32 scales. A stored value q
// stands for q * scale, with scale = absmax / largest, inverse = 1 / scale and
// q = round(value * inverse), each of the three rounded to nearest even; an all-zero row or group
// has scale 1, and no scale lies below the smallest normal float.
#pragma once

#include "approximate.cuh"
#include "pack.cuh"
#include "row.cuh"

namespace fusedops {

constexpr int kGroup = 128;  // neighbouring elements of a row that share a scale
constexpr float kSmallestScale = 1.17549435e-38f;

// FP8 E4M3 (Micikevicius et al., 2022): beyond +-448 it saturates, infinities too; a NaN is 0x7f.
struct E4m3 {
  static constexpr float kLargest = 448.0f;

  static __device__ __forceinline__ unsigned pair(float low, float high) {
#if __CUDA_ARCH__ >= 890
    unsigned short codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    return codes;
#else
    return code(low) | code(high) << 8;
#endif
  }

#if !(__CUDA_ARCH__ >= 890)
  static __device__ __forceinline__ unsigned code(float value) {
    const unsigned bits = __float_as_uint(value);
    const float magnitude = fminf(fabsf(value), kLargest);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7f;
    // Half a unit of the third mantissa bit, minus one where that bit is even; then the exponent's
    // bias goes from 127 to 7. Below 2^-6 codes are multiples of 2^-9.
    const unsigned wide = __float_as_uint(magnitude);
    const unsigned normal = ((wide + 0x7ffffu + (wide >> 20 & 1u)) >> 20) - (120u << 3);
    const unsigned small = __float2uint_rn(magnitude * 512.0f);
    return (magnitude < 0.015625f ? small : normal) | (bits >> 24 & 0x80u);
  }
#endif
};

// Symmetric: clamped at +-127, ties to even; a NaN is 0.
struct Int8 {
  static constexpr float kLargest = 127.0f;

  static __device__ __forceinline__ unsigned code(float value) {
    // The conversion saturates and turns a NaN into 0.
    return static_cast<unsigned>(max(min(__float2int_rn(value), 127), -127)) & 0xffu;
  }
  static __device__ __forceinline__ unsigned pair(float low, float high) {
    return code(low) | code(high) << 8;
  }
};

// What a `Sink` is: the format, and whose scale a value has. kPads: the grid has rows behind the
// last one, for the padding between two groups' scales.
struct Plain {
  static constexpr bool kPads = false;
  static constexpr bool kIsPlain = true;
  static constexpr bool kIsGiven = false;
};
template <class Format_>
struct Given {
  using Format = Format_;
  static constexpr bool kIsPlain = false;
  static constexpr bool kIsGiven = true;
  static constexpr bool kPads = false;
};
template <class Format_>
struct PerToken {
  using Format = Format_;
  static constexpr bool kIsPlain = false;
  static constexpr bool kIsGiven = false;
  static constexpr bool kPads = false;
  static constexpr bool kIsGroup = false;
};
template <class Format_>
struct PerGroup {
  using Format = Format_;
  static constexpr bool kIsPlain = false;
  static constexpr bool kIsGiven = false;
  static constexpr bool kPads = true;
  static constexpr bool kIsGroup = true;
};

// Stores a pack's values times `inverse`, one byte each.
template <class Format, typename T, int kWidth>
__device__ __forceinline__ void store_codes(unsigned char* row, long long index,
                                            const Pack<T, kWidth>& pack, float inverse) {
  float values[kWidth];
  widen(pack, values);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) values[j] *= inverse;
  if constexpr (kWidth == 1) {
    row[index] = static_cast<unsigned char>(Format::pair(values[0], 0.0f));
  } else {
    unsigned pairs[kWidth / 2];
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) {
      pairs[i] = Format::pair(values[2 * i], values[2 * i + 1]);
    }
    if constexpr (kWidth == 2) {
      reinterpret_cast<unsigned short*>(row)[index] = static_cast<unsigned short>(pairs[0]);
    } else if constexpr (kWidth == 4) {
      reinterpret_cast<unsigned*>(row)[index] = pairs[0] | pairs[1] << 16;
    } else {
      static_assert(kWidth == 8, "packs of up to 8 elements");
      reinterpret_cast<uint2*>(row)[index] =
          make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
    }
  }
}

constexpr unsigned kInfinityBits = 0x7f800000u;

// The scale of values whose largest magnitude has these bits; NaN and infinity show in it. The
// division by a constant is a product with its reciprocal and one correction by the remainder
// (Markstein, 1990): the same bits as __fdiv_rn for every float, in a third of the instructions.
template <class Format>
__device__ __forceinline__ float dynamic_scale(unsigned magnitude) {
  constexpr float kReciprocal = 1.0f / Format::kLargest;
  const float absmax = __uint_as_float(magnitude);
  const float estimate = absmax * kReciprocal;
  const float remainder = __fmaf_rn(-estimate, Format::kLargest, absmax);
  const float scale = fmaxf(__fmaf_rn(remainder, kReciprocal, estimate), kSmallestScale);
  return magnitude >= kInfinityBits ? absmax : magnitude == 0 ? 1.0f : scale;
}

// 1 / scale, rounded to nearest, of a dynamic scale: a normal number from 2^-126 to 2^120, infinite
// or NaN. What __frcp_rn does with such numbers, without its branch for the others.
__device__ __forceinline__ float dynamic_inverse(float scale) {
  const float estimate = reciprocal_approximate(scale);
  const float error = __fmaf_rn(-scale, estimate, 1.0f);
  const float inverse = __fmaf_rn(estimate, error, estimate);
  return __float_as_uint(scale) == kInfinityBits ? 0.0f : inverse;
}

// Where 8-bit results go: `values` row after row. Scales are read at given[row * given_stride], and
// written at scales[row], or scales[group * pitch + row] for rows up to the pitch.
struct QuantizedRows {
  unsigned char* values;
  const float* given;
  float* scales;
  long long given_stride;
  long long pitch;
};

// Read before a row's values are joined, which hides its latency.
template <class Sink>
__device__ __forceinline__ float read_scale(const QuantizedRows& to, long long row, bool is_row) {
  if constexpr (Sink::kIsGiven) {
    return is_row ? to.given[row * to.given_stride] : 1.0f;
  } else {
    return 1.0f;
  }
}

// Stores one row of `packs` packs, of which each thread brings its own. `given` is what read_scale
// returned. Every thread of the block must call it.
template <class Layout, class Sink, typename T, int kWidth>
__device__ __forceinline__ void store_quantized(const Layout& at, const QuantizedRows& to,
                                                const Pack<T, kWidth> (&values)[Layout::kPacks],
                                                bool is_row, int packs, float given,
                                                JoinScratch& scratch) {
  using Format = typename Sink::Format;
  constexpr int kPacks = Layout::kPacks;
  unsigned char* row = to.values + at.row * packs * kWidth;
  const auto store = [&](int p, float inverse) {
    if (is_row && at.has(p, packs)) store_codes<Format>(row, at.pack(p), values[p], inverse);
  };
  const auto magnitude = [&](int p) {
    return is_row && at.has(p, packs) ? magnitude_bits(values[p]) : 0u;
  };
  if constexpr (Sink::kIsGiven) {
    const float inverse = __frcp_rn(given);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) store(p, inverse);
  } else if constexpr (Sink::kIsGroup) {
    constexpr int kInWarp = Layout::kLanes < 32 ? Layout::kLanes : 32;
    constexpr int kJoined = kGroup / kWidth < kInWarp ? kGroup / kWidth : kInWarp;
    constexpr int kRun = Layout::kRun;
    static_assert(kRun * kJoined * kWidth == kGroup || (kPacks == 1 && Layout::kLanes <= 32),
                  "a group lies in one run of a warp");
#pragma unroll
    for (int p = 0; p < kPacks; p += kRun) {
      unsigned largest = magnitude(p);
#pragma unroll
      for (int r = 1; r < kRun; ++r) largest = max(largest, magnitude(p + r));
      const float scale = dynamic_scale<Format>(join_warp<Largest, kJoined>(largest));
      const float inverse = dynamic_inverse(scale);
#pragma unroll
      for (int r = 0; r < kRun; ++r) store(p + r, inverse);
      // Rows behind the last one fill the padding with ones.
      if (at.lane % kJoined == 0 && at.has(p, packs) && at.row < to.pitch) {
        to.scales[at.pack(p) / (kGroup / kWidth) * to.pitch + at.row] = scale;
      }
    }
  } else {
    unsigned largest = 0;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) largest = max(largest, magnitude(p));
    largest = join_row<Layout, Largest>(largest, scratch);
    const float scale = dynamic_scale<Format>(largest);
    const float inverse = dynamic_inverse(scale);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) store(p, inverse);
    if (at.is_first() && is_row) to.scales[at.row] = scale;
  }
}

}  // namespace fusedops
