// A warp that attends 16 keys at a time for up to 8 query heads on tensor cores (PTX ISA,
// "mma.m16n8k16"). Keys and values go from memory into registers in the layout that the instruction
// takes, so that no shared memory and no barrier stands between: the order of what a product sums
// over is free, as long as both factors have the same.
//
//   scores^T = K Q^T        rows: keys, columns: heads, summed over the head dim. Lane (g, t) =
//   (lane
//     / 4, lane % 4) holds rows g and g + 8, which it reads as 16 bytes of every 64, quarter t.
//   out^T   += V^T weights^T  rows: the head dim, columns: heads, summed over keys. The lane reads
//     16 bytes of every 128, eighth g, of keys 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, and pairs
//     neighbouring keys with byte permutations. The scores' fragment has a key a row where this one
//     wants a head, which is what movmatrix turns.
//
// Weights are the sum of two 16-bit floats, each with a product, so that 16 bits of them count in
// bfloat16 and 22 in float16; float32 in effect, since the result is rounded to 8 and 11. The
// larger is rounded towards zero and the smaller kept above zero, so that an infinite value gives
// infinity and not the difference of two (NaN where its weight is below 2^-32 of the largest, in
// float16).
#pragma once

#include "attention_loads.cuh"
#include "block_reduce.cuh"

namespace fusedops {

template <typename T>
struct Mma;

template <>
struct Mma<__nv_bfloat16> {
  static constexpr float kShift = 0.0f;  // weights are multiplied by 2^kShift
  static __device__ __forceinline__ void add(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                             unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
  static __device__ __forceinline__ void split(float x, float y, unsigned& large, unsigned& small) {
    constexpr float kTiny = 1.17549435e-38f;
    const unsigned x_bits = __float_as_uint(x), y_bits = __float_as_uint(y);
    large = __byte_perm(x_bits, y_bits, 0x7632);
    small = same_bits<unsigned>(
        PairOf<__nv_bfloat16>::rounded(fmaxf(x - __uint_as_float(x_bits & 0xffff0000u), kTiny),
                                       fmaxf(y - __uint_as_float(y_bits & 0xffff0000u), kTiny)));
  }
};

template <>
struct Mma<__half> {
  // The least float16 then weighs 2^-32 of the largest weight, which is at most 2^15.
  static constexpr float kShift = 8.0f;
  static __device__ __forceinline__ void add(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                             unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
  static __device__ __forceinline__ void split(float x, float y, unsigned& large, unsigned& small) {
    constexpr float kTiny = 5.9604645e-8f;
    asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(large) : "f"(y), "f"(x));
    const float2 kept = PairOf<__half>::widened(pair_of<__half>(large));
    // Without the condition a million keys that hardly count would.
    small = same_bits<unsigned>(
        PairOf<__half>::rounded(fmaxf(x - kept.x, kept.x > 0.0f ? kTiny : 0.0f),
                                fmaxf(y - kept.y, kept.y > 0.0f ? kTiny : 0.0f)));
  }
};

// An 8 x 8 matrix of 16-bit elements, a row in four lanes, turned.
__device__ __forceinline__ unsigned turned(unsigned word) {
  unsigned result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(word));
  return result;
}

template <typename T, typename Cached, int kDim_, int kAlign, bool kCapped>
struct MmaWarp {
  using Query = T;
  using Element = Cached;
  static constexpr int kDim = kDim_;
  static constexpr int kHeads = 8;
  static constexpr bool kIsCoded = sizeof(Cached) == 1;
  static constexpr int kRowBytes = kDim * static_cast<int>(sizeof(Cached));
  static constexpr bool kCanPrefetch = kAlign == 16;
  static constexpr int kBlocks = kIsCoded && kDim <= 128 ? 4 : kDim <= 64 ? 4 : kDim <= 128 ? 3 : 2;
  // Where registers are short, queries are read from shared memory for each unit.
  static constexpr bool kSharesQuery = kDim > 128 || (kIsCoded && kDim == 128);
  static constexpr int kQueryWords = kDim / 8;
  static constexpr int kQueryShared = kSharesQuery ? kQueryWords * kWarp : 1;

  static constexpr int kKeyVector = vector_bytes(kRowBytes / 4);
  static constexpr int kKeyWords = kRowBytes / 16;
  static constexpr int kValueVector = vector_bytes(kRowBytes / 8);
  static constexpr int kValueWords = kRowBytes / 32;
  static constexpr int kTiles = kDim / 16;

  unsigned query[kSharesQuery ? 1 : kQueryWords];
  const unsigned* query_shared;
  unsigned keys[2][kKeyWords];
  unsigned values[4][kValueWords];
  float acc[kTiles][4] = {};
  float high[2] = {minus_infinity(), minus_infinity()};
  float sum[2] = {};

  static __device__ __forceinline__ int group() { return threadIdx.x % kWarp / 4; }
  static __device__ __forceinline__ int quarter() { return threadIdx.x % 4; }

  // Queries of the heads at `q`, `stride` elements apart; zeros for those from `heads` on.
  __device__ __forceinline__ void load_query(const T* q, long long stride, int heads,
                                             unsigned* shared) {
    constexpr int kPerVector = kKeyVector / static_cast<int>(sizeof(Cached));
    const T* row = q + group() * stride + quarter() * kPerVector;
    const bool is_there = group() < heads;
    // A view of a product's columns may begin anywhere.
    const bool is_aligned = reinterpret_cast<unsigned long long>(row) % 8 == 0;
#pragma unroll
    for (int i = 0; i < kQueryWords; i += 2) {
      const T* from = row + 2 * i / kPerVector * 4 * kPerVector + 2 * i % kPerVector;
      uint2 words = make_uint2(0, 0);
      if (is_there && is_aligned) {
        words = *reinterpret_cast<const uint2*>(from);
      } else if (is_there) {
        const unsigned short* parts = reinterpret_cast<const unsigned short*>(from);
        words.x = parts[0] | unsigned{parts[1]} << 16;
        words.y = parts[2] | unsigned{parts[3]} << 16;
      }
      if constexpr (kSharesQuery) {
        if (threadIdx.x < kWarp)
          *reinterpret_cast<uint2*>(shared + kWarp * i + 2 * threadIdx.x) = words;
      } else {
        query[i] = words.x;
        query[i + 1] = words.y;
      }
    }
    query_shared = shared + threadIdx.x % kWarp * 2;
    if constexpr (kSharesQuery) __syncthreads();
  }

  __device__ __forceinline__ void load_keys(const Rows& rows) {
    const char* row = rows.base + group() * rows.slot + quarter() * kKeyVector;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < kKeyWords; i += kKeyVector / 4) {
        load_raw<kKeyVector, kAlign>(row + 8 * r * rows.slot + 16 * i, keys[r] + i);
      }
    }
  }

  __device__ __forceinline__ void load_values(const Rows& rows) {
    const char* row = rows.base + 2 * quarter() * rows.slot + group() * kValueVector;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
#pragma unroll
      for (int i = 0; i < kValueWords; i += kValueVector / 4) {
        load_raw<kValueVector, kAlign>(row + (8 * (r / 2) + r % 2) * rows.slot + 32 * i,
                                       values[r] + i);
      }
    }
  }

  __device__ __forceinline__ void query_words(int step, unsigned& b0, unsigned& b1) const {
    if constexpr (kSharesQuery) {
      const uint2 words = *reinterpret_cast<const uint2*>(query_shared + 2 * kWarp * step);
      b0 = words.x;
      b1 = words.y;
    } else {
      b0 = query[2 * step];
      b1 = query[2 * step + 1];
    }
  }

  // scores[r][h]: of key g + 8 r and head 2 t + h.
  __device__ __forceinline__ void products(float (&scores)[2][2]) const {
    // Two chains, since each product waits for the one before it in its chain.
    float part[2][4] = {};
#pragma unroll
    for (int step = 0; step < kTiles; ++step) {
      unsigned a[4], b0, b1;
      if constexpr (kIsCoded) {
        unsigned words[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          Codes<Cached, T>::widen(keys[r][step], words);
          a[r] = words[0];
          a[2 + r] = words[1];
        }
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = keys[i % 2][2 * step + i / 2];
      }
      query_words(step, b0, b1);
      Mma<T>::add(part[step % 2], a, b0, b1);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[i / 2][i % 2] = part[0][i] + part[1][i];
  }

  // The fragment of V^T for rows of tile `tile`: neighbouring keys of one element in a word.
  __device__ __forceinline__ void turned_values(int tile, unsigned (&a)[4]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if constexpr (kIsCoded) {
        const unsigned selector = tile % 2 == 0 ? 0x5140 : 0x7362;
        unsigned words[2];
        Codes<Cached, T>::widen(
            __byte_perm(values[2 * r][tile / 2], values[2 * r + 1][tile / 2], selector), words);
        a[2 * r] = words[0];
        a[2 * r + 1] = words[1];
      } else {
        a[2 * r] = __byte_perm(values[2 * r][tile], values[2 * r + 1][tile], 0x5410);
        a[2 * r + 1] = __byte_perm(values[2 * r][tile], values[2 * r + 1][tile], 0x7632);
      }
    }
  }

  __device__ __forceinline__ void start(const Rows& k, const Rows& v) {
    load_keys(k);
    load_values(v);
  }

  // Attends a unit whose rows from `begin` to `end` are visible, and loads the next one where there
  // is one. A score is factor * product, or ceiling * tanh(factor * product); both have the log2 of
  // e in them.
  __device__ __forceinline__ void step(int begin, int end, float factor, float ceiling,
                                       bool has_next, const Rows& next_k, const Rows& next_v) {
    float scores[2][2];
    products(scores);
    if (has_next) load_keys(next_k);
    bool is_seen[2];
    float top[2] = {minus_infinity(), minus_infinity()};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = group() + 8 * r;
      is_seen[r] = row >= begin && row < end;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float& score = scores[r][h];
        score *= factor;
        if constexpr (kCapped) score = ceiling * tanhf(score);
        // A NaN does not raise the maximum; its weight will be NaN.
        if (is_seen[r]) top[h] = fmaxf(top[h], fmaxf(score, kLeastScore));
      }
    }
    if (__any_sync(0xffffffffu, top[0] > high[0] + kSlack || top[1] > high[1] + kSlack)) {
      raise(top);
    }
    unsigned large[2], small[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float weight[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float power = scores[r][h] - high[h];
        if constexpr (Mma<T>::kShift != 0.0f) power += Mma<T>::kShift;
        weight[h] = is_seen[r] ? exp2_approximate(power) : 0.0f;
        sum[h] += weight[h];
      }
      Mma<T>::split(weight[0], weight[1], large[r], small[r]);
      large[r] = turned(large[r]);
      small[r] = turned(small[r]);
    }
    if (begin > 0 || end < 16) hide_values(begin, end);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      unsigned a[4];
      turned_values(tile, a);
      Mma<T>::add(acc[tile], a, large[0], large[1]);
      Mma<T>::add(acc[tile], a, small[0], small[1]);
    }
    if (has_next) load_values(next_v);
  }

  // New maxima for both heads, and what was summed under the old ones brought to them. Whoever
  // comes here has seen a key, so that no maximum stays minus infinity.
  __device__ __forceinline__ void raise(const float (&top)[2]) {
    float fix[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float most = fmaxf(high[h], top[h]);
#pragma unroll
      for (int offset = 4; offset < kWarp; offset *= 2) {
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, offset));
      }
      fix[h] = exp2_approximate(high[h] - most);
      sum[h] *= fix[h];
      high[h] = most;
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[tile][i] *= fix[i % 2];
    }
  }

  // Zeros in place of values that are not visible: a weight of zero times a NaN would be a NaN.
  __device__ __forceinline__ void hide_values(int begin, int end) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int row = 2 * quarter() + 8 * (r / 2) + r % 2;
#pragma unroll
      for (int i = 0; i < kValueWords; ++i) {
        if (row < begin || row >= end) values[r][i] = 0;
      }
    }
  }

  // The warp's maxima and sums as pairs by head, and its unnormalised result in rows of `pitch`.
  __device__ __forceinline__ void store(float2* totals, float* out, int pitch) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int offset = 4; offset < kWarp; offset *= 2) {
        sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], offset);
      }
      const int head = 2 * quarter() + h;
      if (group() == 0) totals[head] = make_float2(high[h], sum[h]);
      constexpr int kPerVector = kValueVector / static_cast<int>(sizeof(Cached));
#pragma unroll
      for (int x = 0; x < kDim / 8; x += 4) {
        const int element = x / kPerVector * 8 * kPerVector + group() * kPerVector + x % kPerVector;
        *reinterpret_cast<float4*>(out + head * pitch + element) =
            make_float4(acc[x / 2][h], acc[x / 2][2 + h], acc[x / 2 + 1][h], acc[x / 2 + 1][2 + h]);
      }
    }
  }
};

}  // namespace fusedops
