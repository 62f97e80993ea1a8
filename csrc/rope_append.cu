// Rotary position embedding of q and k, and the append of k and v to a paged cache: either or both.
//
// blockIdx.x is a token; the threads of a row of blocks take its heads, kWidth pairs each, q's
// heads first, then k's, then v's. A rotated pair is computed in float32 and rounded once; the
// cache gets the rounded key.

#include "convert.cuh"
#include "pdl.cuh"

namespace fusedops {

constexpr int kThreads = 256;

template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth) Pack {
  T data[kWidth];
};

template <typename T, int kWidth>
__device__ __forceinline__ Pack<T, kWidth> load_pack(const T* from) {
  return *reinterpret_cast<const Pack<T, kWidth>*>(from);
}

template <typename T, int kWidth>
__device__ __forceinline__ void store_pack(T* to, const Pack<T, kWidth>& pack) {
  *reinterpret_cast<Pack<T, kWidth>*>(to) = pack;
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
template <typename T, int kWidth, bool kInterleaved, bool kRope, bool kAppend, bool kInPlace>
__global__ void __launch_bounds__(kThreads)
    rope_append(const T* q, const T* k, const T* v, const void* positions, const float* cos_sin,
                T* q_out, T* k_out, T* k_cache, T* v_cache, const int* block_table,
                const int* request_index, int q_heads, int k_heads, int head_dim, int rotary_dim,
                int is_wide, long long rows, long long pages, int page_size, long long requests,
                long long max_pages, long long q0, long long q1, long long q2, long long k0,
                long long k1, long long k2, long long v0, long long v1, long long v2,
                long long q_out0, long long q_out1, long long q_out2, long long k_out0,
                long long k_out1, long long k_out2, long long k_cache0, long long k_cache1,
                long long k_cache2, long long k_cache3, long long v_cache0, long long v_cache1,
                long long v_cache2, long long v_cache3, long long position_stride,
                long long row_stride, long long angle_stride, long long table_stride0,
                long long table_stride1, long long request_stride) {
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
  const long long position = load_number(positions, token * position_stride, is_wide);

  // The token's place in the cache, -1 for none.
  long long page = -1;
  int slot = 0;
  const bool is_query = kRope && item < of_turned && item / per_head < q_heads;
  if (kAppend && !is_query && position >= 0 && (!kRope || position < rows)) {
    const long long request = request_index[token * request_stride];
    const long long block = position / page_size;
    if (request >= 0 && request < requests && block < max_pages) {
      page = block_table[request * table_stride0 + block * table_stride1];
      slot = static_cast<int>(position - block * page_size);
      if (page >= pages) page = -1;
    }
  }

  if (item >= of_turned) {
    const int head = (item - of_turned) / per_value;
    const int element = ((item - of_turned) - head * per_value) * kWidth;
    if (page < 0) return;
    const Elements values = load_pack<T, kWidth>(v + token * v0 + head * v1 + element * v2);
    store_pack(v_cache + page * v_cache0 + slot * v_cache1 + head * v_cache2 + element * v_cache3,
               values);
    return;
  }

  const int joint_head = item / per_head;
  const int part = item - joint_head * per_head;
  const int head = is_query ? joint_head : joint_head - (kRope ? q_heads : 0);
  const T* from = is_query ? q + token * q0 + head * q1 : k + token * k0 + head * k1;
  const long long step = is_query ? q2 : k2;
  T* cached = k_cache + page * k_cache0 + slot * k_cache1 + head * k_cache2;
  T* to =
      is_query ? q_out + token * q_out0 + head * q_out1 : k_out + token * k_out0 + head * k_out1;
  const long long out_step = is_query ? q_out2 : k_out2;

  if (!kRope || part >= turning) {
    // Behind the rotary part, which nothing changes.
    const int element = (kRope ? rotary_dim : 0) + (part - turning) * kWidth;
    Elements values = load_pack<T, kWidth>(from + element * step);
    if (kAppend && page >= 0) store_pack(cached + element * k_cache3, values);
    if (kRope && !kInPlace) {
      if (position < 0 || position >= rows) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) values.data[j] = from_float<T>(0.0f);
      }
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
    float turned[2 * kWidth];
    float given[2 * kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      given[j] = to_float(low.data[j]);
      given[kWidth + j] = to_float(high.data[j]);
    }
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const float cosine = angles[(pair + j) * angle_stride];
      const float sine = angles[(half + pair + j) * angle_stride];
      const int a = kInterleaved ? 2 * j : j;
      const int b = kInterleaved ? 2 * j + 1 : kWidth + j;
      turned[a] = fmaf(-given[b], sine, given[a] * cosine);
      turned[b] = fmaf(given[a], sine, given[b] * cosine);
    }
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      low.data[j] = from_float<T>(turned[j]);
      high.data[j] = from_float<T>(turned[kWidth + j]);
    }
  } else if (!kInPlace) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) low.data[j] = high.data[j] = from_float<T>(0.0f);
  }
  if (is_inside || !kInPlace) {
    store_pack(to + first * out_step, low);
    store_pack(to + second * out_step, high);
  }
  if (kAppend && page >= 0) {
    store_pack(cached + first * k_cache3, low);
    store_pack(cached + second * k_cache3, high);
  }
}

}  // namespace fusedops
