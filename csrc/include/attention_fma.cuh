// A warp that attends 16 keys at a time for up to 4 query heads in float32 throughout, for float32
// queries: tensor cores round them to 11 bits. A lane holds 4 of every 128 elements of a row. For 8
// keys at a time its 32 partial products (key, head) meet those of the other lanes in a butterfly
// that leaves each lane one score.
#pragma once

#include "attention_loads.cuh"
#include "block_reduce.cuh"

namespace fusedops {

template <typename Cached, int kDim_, int kAlign, bool kCapped>
struct FmaWarp {
  using Query = float;
  using Element = Cached;
  static constexpr int kDim = kDim_;
  static constexpr int kHeads = 4;
  static constexpr bool kIsCoded = sizeof(Cached) == 1;
  static constexpr int kRowBytes = kDim * static_cast<int>(sizeof(Cached));
  static constexpr bool kCanPrefetch = kAlign == 16;
  static constexpr int kBlocks = kDim <= 128 ? 3 : 2;
  static constexpr int kQueryShared = 1;

  static constexpr int kKeys = 8;
  static constexpr int kVectors = (kDim + 127) / 128;
  static constexpr int kBytes = 4 * static_cast<int>(sizeof(Cached));
  static constexpr int kWords = kBytes / 4;

  Rows keys, values;
  float query[kHeads][kVectors][4];
  float acc[kHeads][kVectors][4] = {};
  // Of the lane's head, lane % 4.
  float high = minus_infinity();
  float sum = 0.0f;

  static __device__ __forceinline__ int lane() { return threadIdx.x % kWarp; }
  static __device__ __forceinline__ int element(int vector) {
    return 4 * (lane() + kWarp * vector);
  }

  // As MmaWarp's; there is no shared memory to take.
  __device__ __forceinline__ void load_query(const float* q, long long stride, int heads,
                                             unsigned*) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          query[h][j][e] = h < heads && element(j) < kDim ? q[h * stride + element(j) + e] : 0.0f;
        }
      }
    }
  }

  __device__ __forceinline__ void start(const Rows& k, const Rows& v) {
    keys = k;
    values = v;
  }

  __device__ __forceinline__ void load(const Rows& rows, int first,
                                       unsigned (&words)[kKeys][kVectors][kWords]) const {
#pragma unroll
    for (int key = 0; key < kKeys; ++key) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const char* from =
            rows.base + (first + key) * rows.slot + element(j) * static_cast<int>(sizeof(Cached));
        if (element(j) < kDim) {
          load_raw<kBytes, kAlign>(from, words[key][j]);
        } else {
#pragma unroll
          for (unsigned& word : words[key][j]) word = 0;
        }
      }
    }
  }

  static __device__ __forceinline__ float as_float(const unsigned (&words)[kWords], int e) {
    if constexpr (kIsCoded) {
      return code_to_float(Cached(), words[0] >> 8 * e & 0xffu);
    } else {
      return __uint_as_float(words[e]);
    }
  }

  // Adds each of 2 kHalf parts over pairs of lanes that are kHalf apart, of which the upper keeps
  // the upper parts; then the same with half as many.
  template <int kHalf>
  static __device__ __forceinline__ void fold(float* parts) {
    const bool is_upper = lane() & kHalf;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float given = is_upper ? parts[i] : parts[i + kHalf];
      const float kept = is_upper ? parts[i + kHalf] : parts[i];
      parts[i] = kept + __shfl_xor_sync(0xffffffffu, given, kHalf);
    }
    if constexpr (kHalf > 1) fold<kHalf / 2>(parts);
  }

  // The score of key lane / 4 and head lane % 4.
  __device__ __forceinline__ float product(const unsigned (&words)[kKeys][kVectors][kWords]) const {
    float parts[kKeys * kHeads] = {};
#pragma unroll
    for (int key = 0; key < kKeys; ++key) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float value = as_float(words[key][j], e);
#pragma unroll
          for (int h = 0; h < kHeads; ++h) {
            parts[key * kHeads + h] = fmaf(value, query[h][j][e], parts[key * kHeads + h]);
          }
        }
      }
    }
    fold<kWarp / 2>(parts);
    return parts[0];
  }

  // As MmaWarp's.
  __device__ __forceinline__ void step(int begin, int end, float factor, float ceiling,
                                       bool has_next, const Rows& next_k, const Rows& next_v) {
#pragma unroll 1
    for (int first = 0; first < 16; first += kKeys) {
      unsigned k_words[kKeys][kVectors][kWords], v_words[kKeys][kVectors][kWords];
      load(keys, first, k_words);
      load(values, first, v_words);
      float score = factor * product(k_words);
      if constexpr (kCapped) score = ceiling * tanhf(score);
      const int row = first + lane() / kHeads;
      const bool is_seen = row >= begin && row < end;
      const float top = is_seen ? fmaxf(score, kLeastScore) : minus_infinity();
      if (__any_sync(0xffffffffu, top > high + kSlack)) raise(top);
      const float weight = is_seen ? exp2_approximate(score - high) : 0.0f;
      sum += weight;
#pragma unroll
      for (int key = 0; key < kKeys; ++key) {
        // What is not visible is not multiplied: a weight of zero times a NaN would be a NaN.
        if (first + key < begin || first + key >= end) continue;
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          const float part = __shfl_sync(0xffffffffu, weight, key * kHeads + h);
#pragma unroll
          for (int j = 0; j < kVectors; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              acc[h][j][e] = fmaf(part, as_float(v_words[key][j], e), acc[h][j][e]);
            }
          }
        }
      }
    }
    if (has_next) start(next_k, next_v);
  }

  // As MmaWarp's.
  __device__ __forceinline__ void raise(float top) {
    float most = fmaxf(high, top);
#pragma unroll
    for (int offset = kHeads; offset < kWarp; offset *= 2) {
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, offset));
    }
    const float fix = exp2_approximate(high - most);
    sum *= fix;
    high = most;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const float factor = __shfl_sync(0xffffffffu, fix, h);
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[h][j][e] *= factor;
      }
    }
  }

  // As MmaWarp's.
  __device__ __forceinline__ void store(float2* totals, float* out, int pitch) {
#pragma unroll
    for (int offset = kHeads; offset < kWarp; offset *= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    }
    if (lane() < kHeads) totals[lane()] = make_float2(high, sum);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        if (element(j) < kDim) {
          *reinterpret_cast<float4*>(out + h * pitch + element(j)) =
              make_float4(acc[h][j][0], acc[h][j][1], acc[h][j][2], acc[h][j][3]);
        }
      }
    }
  }
};

}  // namespace fusedops
