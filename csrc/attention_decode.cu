// Decode attention over a paged KV cache: one query a request, lengths and block table on the
// device.
//
// A cluster has one request and one tile of the query heads that share a KV head (8 on tensor
// cores, 4 in float32); its blocks and their warps share the keys (decode_split.cuh), each warp by
// itself from memory to its partial result, and join them at the end (attention_combine.cuh). Plans
// choose as many blocks a cluster as run at once, from shapes alone; how keys are shared follows
// the length.
//
// Budgets on an H200, bfloat16 and a head dim of 128. Memory gives an SM 35 KB a us; a unit of 16
// keys is 8 KB. A warp spends about 200 instructions on it (16 loads, 24 products of tensor cores,
// 32 permutations, 40 for the softmax, the rest addresses), so that a scheduler issues 220 of its
// 1755 slots a us, and its tensor core is busy for 12 % of them. 8-bit codes take about 480 for 4
// KB: 1000 slots. The wall is memory, and before it latency: registers are the buffer, 8 KB a warp,
// for 12 warps an SM 96 KB, of which the time between arrival and the next load takes a quarter; 42
// KB in flight cover a latency of 1.2 us.
//
// The kernel ahead (PDL) may still run when this one starts, and may write anything that is read
// here: the newest keys and values, q, lengths, even the table. So everything counts only after the
// wait. Before it, lengths and table are read as hints: the units that they point to are brought
// into the L2, which has one copy of everything and so no stale one; a hint that points nowhere is
// refused as a wrong page is. After the wait the first unit is loaded by the hints while they are
// read again, and once more where they changed.
#include "attention_combine.cuh"
#include "attention_fma.cuh"
#include "attention_mma.cuh"
#include "decode_split.cuh"
#include "pdl.cuh"

namespace fusedops {

// Strides are in elements, but those of a cache in bytes.
struct PagedCache {
  const char* base;  // of this KV head
  long long page_stride;
  long long slot_stride;

  __device__ __forceinline__ Rows rows(int page, int unit_of_page) const {
    return {base + page * page_stride + unit_of_page * (kUnit * slot_stride), slot_stride};
  }
};

// Where the block table says that a unit lies.
struct Place {
  int page;  // negative: outside the pool, where nothing is attended
  int unit_of_page;
};

// One request's row of the block table.
struct TableRow {
  const int* row;
  long long stride;
  int pages;
  int units_a_page;

  __device__ __forceinline__ Place place(const Share& share, int k, int parts) const {
    Place place = {-1, 0};
    if (k < share.count) {
      const int unit = share.unit(k, parts);
      const int entry = unit / units_a_page;
      const int page = load_coherent(row + entry * stride);
      if (page >= 0 && page < pages) place = {page, unit - entry * units_a_page};
    }
    return place;
  }
};

__device__ __forceinline__ Place broadcast(const Place& place, int lane) {
  return {__shfl_sync(0xffffffffu, place.page, lane),
          __shfl_sync(0xffffffffu, place.unit_of_page, lane)};
}

// A unit outside the pool is loaded from page 0, and none of it is visible.
__device__ __forceinline__ Rows rows_of(const PagedCache& cache, const Place& place) {
  return cache.rows(max(place.page, 0), place.unit_of_page);
}

template <class Warp>
__device__ __forceinline__ void prefetch(const PagedCache& k_cache, const PagedCache& v_cache,
                                         const Place& places, int count) {
  if constexpr (Warp::kCanPrefetch) {
    const int lane = threadIdx.x % kWarp;
    for (int k = 0; k < count; ++k) {
      const Place place = broadcast(places, k);
      if (place.page < 0) continue;
      const Rows rows = rows_of(lane < kUnit ? k_cache : v_cache, place);
      prefetch_to_l2<Warp::kRowBytes>(rows.base + lane % kUnit * rows.slot);
    }
  }
}

template <class Warp, int kCluster>
__global__ void __launch_bounds__(kAttentionThreads, Warp::kBlocks)
    attention_decode(const typename Warp::Query* q, const typename Warp::Element* k_cache,
                     const typename Warp::Element* v_cache, const int* table, const int* lengths,
                     const float* k_scale, const float* v_scale, typename Warp::Query* out,
                     int kv_heads, int group, int pages, int units_a_page, int capacity, int window,
                     int units_ahead, float factor, float ceiling, long long q_token,
                     long long q_head, long long k_page, long long k_slot, long long k_head,
                     long long v_page, long long v_slot, long long v_head, long long table_row,
                     long long table_entry, long long length_stride, long long k_scale_stride,
                     long long v_scale_stride) {
  pdl_launch_dependents();
  if constexpr (kCluster > 1) cluster_arrive();
  __shared__ Combine<Warp, kCluster> combine;
  __shared__ __align__(16) unsigned query_shared[Warp::kQueryShared];

  const int lane = threadIdx.x % kWarp;
  const int rank = blockIdx.x % kCluster;
  const int tile_of_all = blockIdx.x / kCluster;
  const int tiles = (group + Warp::kHeads - 1) / Warp::kHeads;
  const int kv_head = tile_of_all / tiles;
  const int first_head = (tile_of_all - kv_head * tiles) * Warp::kHeads;
  const int heads = min(group - first_head, Warp::kHeads);
  const long long request = blockIdx.y;
  constexpr int kParts = kCluster * kAttentionWarps;
  const int part = rank + kCluster * (threadIdx.x / kWarp);

  const PagedCache keys = {reinterpret_cast<const char*>(k_cache) + kv_head * k_head, k_page,
                           k_slot};
  const PagedCache values = {reinterpret_cast<const char*>(v_cache) + kv_head * v_head, v_page,
                             v_slot};
  const TableRow row = {table + request * table_row, table_entry, pages, units_a_page};
  const int* own_length = lengths + request * length_stride;

  // It may be written meanwhile, and a warp must agree on it.
  int length = __shfl_sync(0xffffffffu, load_coherent(own_length), 0);
  Share share = share_of(length, window, capacity, part, kParts);
  Place places = row.place(share, lane, kParts);
  prefetch<Warp>(keys, values, places, min(share.count, units_ahead));
  pdl_wait();

  Warp warp;
  Place place = broadcast(places, 0);
  if (share.count > 0) warp.start(rows_of(keys, place), rows_of(values, place));
  const int hinted_length = length;
  const int hinted_page = places.page;
  length = load_coherent(own_length);
  places = row.place(share, lane, kParts);
  const int head = kv_head * group + first_head;
  warp.load_query(q + request * q_token + head * q_head, q_head, heads, query_shared);
  float result_scale = 1.0f;
  if constexpr (Warp::kIsCoded) {
    factor *= k_scale[kv_head * k_scale_stride];
    result_scale = v_scale[kv_head * v_scale_stride];
  }
  if (length != hinted_length) {
    share = share_of(length, window, capacity, part, kParts);
    places = row.place(share, lane, kParts);
  }
  if (__any_sync(0xffffffffu, length != hinted_length || places.page != hinted_page)) {
    place = broadcast(places, 0);
    if (share.count > 0) warp.start(rows_of(keys, place), rows_of(values, place));
  }

  // Places of the units are read 32 at a time, one a lane, and the next 32 while these are used.
  Place later = row.place(share, kWarp + lane, kParts);
#pragma unroll 1
  for (int k = 0; k < share.count; ++k) {
    const int first = share.unit(k, kParts) * kUnit;
    const int begin = place.page < 0 ? 0 : min(max(share.low - first, 0), kUnit);
    const int end = place.page < 0 ? 0 : min(share.high - first, kUnit);
    if ((k + 1) % kWarp == 0) {
      places = later;
      later = row.place(share, k + 1 + kWarp + lane, kParts);
    }
    place = broadcast(places, (k + 1) % kWarp);
    warp.step(begin, end, factor, ceiling, k + 1 < share.count, rows_of(keys, place),
              rows_of(values, place));
  }
  combine.run(warp, out + (request * kv_heads * group + head) * Warp::kDim, heads, result_scale);
}

}  // namespace fusedops
