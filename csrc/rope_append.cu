// Rotary position embedding of q and k, and the append of k and v to a paged cache: either or both.
//
// blockIdx.x is a token; the threads of a row of blocks take its heads, kWidth pairs each, q's
// heads first, then k's, then v's. A rotated pair is computed in float32 and rounded once; the
// cache gets the rounded key, as it is or as 8 bits with given scales.

#include "pack.cuh"
#include "pdl.cuh"
#include "row_store.cuh"

namespace fusedops {

constexpr int kThreads = 256;

template <typename T, int kWidth>
__device__ __forceinline__ Pack<T, kWidth> load_pack(const T* from) {
  return *reinterpret_cast<const Pack<T, kWidth>*>(from);
}

template <typename T, int kWidth>
__device__ __forceinline__ void store_pack(T* to, const Pack<T, kWidth>& pack) {
  *reinterpret_cast<Pack<T, kWidth>*>(to) = pack;
}

// What a cache holds: elements of T, or 8-bit codes.
template <class Sink, typename T>
struct CacheElement {
  using type = unsigned char;
};
template <typename T>
struct CacheElement<Plain, T> {
  using type = T;
};

// Stores a pack in a cache; `inverse` is one over the scale of 8-bit codes.
template <class Sink, typename T, int kWidth>
__device__ __forceinline__ void store_cached(typename CacheElement<Sink, T>::type* to,
                                             const Pack<T, kWidth>& pack, float inverse) {
  if constexpr (Sink::kIsPlain) {
    store_pack(to, pack);
  } else {
    store_codes<typename Sink::Format>(to, 0, pack, inverse);
  }
}

// Element `index` of int32 or int64 numbers.
__device__ __forceinline__ long long load_number(const void* numbers, long long index,
                                                 bool is_wide) {
  return is_wide ? static_cast<const long long*>(numbers)[index]
                 : static_cast<const int*>(numbers)[index];
}

// kWidth elements at a time need all of `element` to be 1 and the rest to be multiples of kWidth.
// kInPlace: a token without a position stays as it is, otherwise it gets zeros; a negative one of a
// call that appends too is padding, which turns by the first row and is not stored.
// Sink: `Plain`, or `Given` with a scale for each KV head, or one at a stride of 0.
template <typename T, int kWidth, bool kInterleaved, bool kRope, bool kAppend, bool kInPlace,
          class Sink>
__global__ void __launch_bounds__(kThreads)
    rope_append(const T* q, const T* k, const T* v, const void* positions, const float* cos_sin,
                T* q_out, T* k_out, typename CacheElement<Sink, T>::type* k_cache,
                typename CacheElement<Sink, T>::type* v_cache, const int* block_table,
                const int* request_index, const float* k_scale, const float* v_scale, int q_heads,
                int k_heads, int head_dim, int rotary_dim, int is_wide, long long rows,
                long long pages, int page_size, long long requests, long long max_pages,
                long long q0, long long q1, long long q2, long long k0, long long k1, long long k2,
                long long v0, long long v1, long long v2, long long q_out0, long long q_out1,
                long long q_out2, long long k_out0, long long k_out1, long long k_out2,
                long long k_cache0, long long k_cache1, long long k_cache2, long long k_cache3,
                long long v_cache0, long long v_cache1, long long v_cache2, long long v_cache3,
                long long position_stride, long long row_stride, long long angle_stride,
                long long table_stride0, long long table_stride1, long long request_stride,
                long long k_scale_stride, long long v_scale_stride) {
  using Cached = typename CacheElement<Sink, T>::type;
  using Elements = Pack<T, kWidth>;
  pdl_launch_dependents();
  const long long token = blockIdx.x;
  const int half = rotary_dim / 2;
  const int turning = kRope ? half / kWidth : 0;
  const int passing = (head_dim - (kRope ? rotary_dim : 0)) / kWidth;
  // Rotated heads are q's and k's; in a call without RoPE only k is copied.
  const int turned_heads = kRope ? q_heads + k_heads : k_heads;
  const int per_head = turning + passing;
  const int of_turned = turned_heads * per_head;
  const int per_value = head_dim / kWidth;
  const int all = of_turned + (kAppend ? k_heads * per_value : 0);
  const int item = blockIdx.y * kThreads + threadIdx.x;
  pdl_wait();
  if (item >= all) return;
  const bool is_value = kAppend && item >= of_turned;
  const int joint_head = item / per_head;
  const bool is_query = kRope && !is_value && joint_head < q_heads;
  const int head = is_value   ? (item - of_turned) / per_value
                   : is_query ? joint_head
                              : joint_head - (kRope ? q_heads : 0);
  const long long position = load_number(positions, token * position_stride, is_wide);
  float inverse = 1.0f;
  if constexpr (kAppend && !Sink::kIsPlain) {
    // Asked for ahead of the place, which takes two reads that wait for the position.
    const float* scale =
        is_value ? v_scale + head * v_scale_stride : k_scale + head * k_scale_stride;
    if (!is_query) inverse = __frcp_rn(*scale);
  }

  // The token's place in the cache, -1 for none.
  long long page = -1;
  int slot = 0;
  if (kAppend && !is_query && position >= 0 && (!kRope || position < rows)) {
    const long long request = request_index[token * request_stride];
    const long long block = position / page_size;
    if (request >= 0 && request < requests && block < max_pages) {
      page = block_table[request * table_stride0 + block * table_stride1];
      slot = static_cast<int>(position - block * page_size);
      if (page >= pages) page = -1;
    }
  }

  if (is_value) {
    const int element = ((item - of_turned) - head * per_value) * kWidth;
    if (page < 0) return;
    const Elements values = load_pack<T, kWidth>(v + token * v0 + head * v1 + element * v2);
    Cached* cached =
        v_cache + page * v_cache0 + slot * v_cache1 + head * v_cache2 + element * v_cache3;
    store_cached<Sink>(cached, values, inverse);
    return;
  }

  const int part = item - joint_head * per_head;
  const T* from = is_query ? q + token * q0 + head * q1 : k + token * k0 + head * k1;
  const long long step = is_query ? q2 : k2;
  Cached* cached = k_cache + page * k_cache0 + slot * k_cache1 + head * k_cache2;
  T* to =
      is_query ? q_out + token * q_out0 + head * q_out1 : k_out + token * k_out0 + head * k_out1;
  const long long out_step = is_query ? q_out2 : k_out2;

  if (!kRope || part >= turning) {
    // Behind the rotary part, which nothing changes.
    const int element = (kRope ? rotary_dim : 0) + (part - turning) * kWidth;
    Elements values = load_pack<T, kWidth>(from + element * step);
    if (kAppend && page >= 0) store_cached<Sink>(cached + element * k_cache3, values, inverse);
    if (kRope && !kInPlace) {
      if (position < 0 || position >= rows) values = filled_pack<T, kWidth>(0.0f);
      store_pack(to + element * out_step, values);
    }
    return;
  }

  // Elements of pair i: i and i + half, or 2 i and 2 i + 1.
  const int pair = part * kWidth;
  const int first = kInterleaved ? 2 * pair : pair;
  const int second = kInterleaved ? first + kWidth : pair + half;
  const long long row = kAppend && position < 0 ? 0 : position;
  const bool is_inside = row >= 0 && row < rows;
  Elements low = load_pack<T, kWidth>(from + first * step);
  Elements high = load_pack<T, kWidth>(from + second * step);
  if (is_inside) {
    const float* angles = cos_sin + row * row_stride;
    // Both packs' elements in order.
    float values[2][kWidth];
    widen(low, values[0]);
    widen(high, values[1]);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const float cosine = angles[(pair + j) * angle_stride];
      const float sine = angles[(half + pair + j) * angle_stride];
      const int a = kInterleaved ? 2 * j : j;
      const int b = kInterleaved ? 2 * j + 1 : kWidth + j;
      float& first_of_pair = values[a / kWidth][a % kWidth];
      float& second_of_pair = values[b / kWidth][b % kWidth];
      const float turned = fmaf(-second_of_pair, sine, first_of_pair * cosine);
      second_of_pair = fmaf(first_of_pair, sine, second_of_pair * cosine);
      first_of_pair = turned;
    }
    low = rounded<T, kWidth>(values[0]);
    high = rounded<T, kWidth>(values[1]);
  } else if (!kInPlace) {
    low = high = filled_pack<T, kWidth>(0.0f);
  }
  if (is_inside || !kInPlace) {
    store_pack(to + first * out_step, low);
    store_pack(to + second * out_step, high);
  }
  if (kAppend && page >= 0) {
    store_cached<Sink>(cached + first * k_cache3, low, inverse);
    store_cached<Sink>(cached + second * k_cache3, high, inverse);
  }
}

}  // namespace fusedops
