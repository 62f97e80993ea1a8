// Rows that threads keep in registers: which packs are whose, and joining values over a row.
#pragma once

#include "dims.cuh"
#include "ptx.cuh"

namespace fusedops {

// Where a thread stands. A row has kLanes threads: a power of two up to 32 with several rows a
// block, or all kThreads of its block, of which `parts` neighbours in blockIdx.x share the row.
// With kCluster > 1 these parts are a cluster and join their values.
//
// Each thread keeps kPacks packs. Neighbouring threads have neighbouring packs; with kRun > 1 a
// warp takes kRun * 32 packs in a row, which are a group of elements that share a scale.
//
// kIsFull: a row has exactly as many packs as its threads keep, so that none needs to be asked for.
// kIsEarly: the next kernel may start when this one begins (pdl.cuh).
template <int kThreads_, int kLanes_, int kPacks_, int kRun_, int kCluster_, bool kIsFull_,
          bool kIsEarly_ = false>
struct RowLayout {
  static constexpr int kThreads = kThreads_;
  static constexpr int kLanes = kLanes_;
  static constexpr int kPacks = kPacks_;
  static constexpr int kRun = kRun_;
  static constexpr int kCluster = kCluster_;
  static constexpr bool kIsFull = kIsFull_;
  static constexpr bool kIsEarly = kIsEarly_;
  static_assert(kThreads % 32 == 0 && kPacks % kRun == 0, "whole warps and runs");
  static_assert(kLanes == kThreads || (kLanes <= 32 && (kLanes & (kLanes - 1)) == 0), "lanes");
  static_assert(kRun == 1 || kLanes % 32 == 0, "a run takes a warp");

  long long row;  // may lie behind the last one
  int lane;
  int first;  // pack of the row with which this block begins

  static __device__ __forceinline__ RowLayout of_thread(unsigned parts) {
    if constexpr (kLanes < kThreads) {
      const long long block = blockIdx.x;
      const int in_block = static_cast<int>(threadIdx.x) / kLanes;
      return {block * (kThreads / kLanes) + in_block, static_cast<int>(threadIdx.x) % kLanes, 0};
    } else {
      const unsigned row = blockIdx.x / parts;
      const int part = static_cast<int>(blockIdx.x - row * parts);
      return {row, static_cast<int>(threadIdx.x), part * kPacks * kLanes};
    }
  }

  // Blocks that fit an SM with so many registers a thread, of which it has 65,536.
  static __device__ constexpr int resident(int registers) {
    return kThreads * registers > 65536 ? 1 : 65536 / (kThreads * registers);
  }

  // Number in its row of this thread's pack p.
  __device__ __forceinline__ int pack(int p) const {
    if constexpr (kRun == 1) {
      return first + p * kLanes + lane;
    } else {
      const int run = p / kRun * (kLanes / 32) + lane / 32;
      return first + (run * kRun + p % kRun) * 32 + lane % 32;
    }
  }

  // Whether a row of `packs` packs has this thread's pack p.
  __device__ __forceinline__ bool has(int p, int packs) const { return kIsFull || pack(p) < packs; }

  // Whether the row exists. Where kPads, or with several rows a block, rows of the grid may not.
  template <bool kPads>
  __device__ __forceinline__ bool is_row(long long rows) const {
    return (!kPads && kLanes == kThreads) || row < rows;
  }

  // Whether this thread is the one that writes what belongs to the whole row.
  __device__ __forceinline__ bool is_first() const { return lane == 0 && first == 0; }
};

// Distance in elements of row number `row` of `rows` from the first one. kIsFlat: they are one
// dimension, which is most of the time and saves the code of divisions.
template <bool kIsFlat>
__device__ __forceinline__ long long row_offset(const Dims& dims, long long row, long long rows) {
  if constexpr (kIsFlat) return row * dims.stride[kMaxDims - 1];
  // A 64-bit division takes four times as long as one of 32 bits.
  if (rows <= 0xffffffffll) return dims.offset(static_cast<unsigned>(row));
  return dims.offset(static_cast<unsigned long long>(row));
}

struct Add {
  using Value = float;
  static __device__ __forceinline__ float empty() { return 0.0f; }
  static __device__ __forceinline__ float merge(float a, float b) { return a + b; }
  static __device__ __forceinline__ unsigned bits(float value) { return __float_as_uint(value); }
  static __device__ __forceinline__ float value(unsigned bits) { return __uint_as_float(bits); }
};

struct Largest {
  using Value = unsigned;
  static __device__ __forceinline__ unsigned empty() { return 0; }
  static __device__ __forceinline__ unsigned merge(unsigned a, unsigned b) { return max(a, b); }
  static __device__ __forceinline__ unsigned bits(unsigned value) { return value; }
  static __device__ __forceinline__ unsigned value(unsigned bits) { return bits; }
};

// Joins the values of kCount neighbouring lanes, a power of two; each of them gets the result.
template <class Op, int kCount>
__device__ __forceinline__ typename Op::Value join_warp(typename Op::Value value) {
#pragma unroll
  for (int offset = kCount / 2; offset > 0; offset /= 2) {
    value = Op::merge(value, __shfl_xor_sync(0xffffffffu, value, offset));
  }
  return value;
}

// One instruction for the maximum over a whole warp.
template <>
__device__ __forceinline__ unsigned join_warp<Largest, 32>(unsigned value) {
  return __reduce_max_sync(0xffffffffu, value);
}

// Shared memory of one `join_row`; another one must not reuse it.
struct JoinScratch {
  unsigned of_warp[32];
  unsigned of_block[8];
};

__device__ constexpr int power_of_two_from(int count) {
  int power = 1;
  while (power < count) power *= 2;
  return power;
}

// Joins the values of a row's threads in an order that depends on the layout alone; each of them
// gets the result. Every thread of the block must call it. In a cluster the blocks must have met
// before, because they write into each other's shared memory.
template <class Layout, class Op>
__device__ __forceinline__ typename Op::Value join_row(typename Op::Value value,
                                                       JoinScratch& scratch) {
  value = join_warp < Op, Layout::kLanes<32 ? Layout::kLanes : 32>(value);
  if constexpr (Layout::kLanes > 32) {
    constexpr int kWarps = Layout::kLanes / 32;
    constexpr int kJoined = power_of_two_from(kWarps);
    if (threadIdx.x % 32 == 0) scratch.of_warp[threadIdx.x / 32] = Op::bits(value);
    __syncthreads();
    const int warp = threadIdx.x % kJoined;
    value = warp < kWarps ? Op::value(scratch.of_warp[warp]) : Op::empty();
    value = join_warp<Op, kJoined>(value);
  }
  if constexpr (Layout::kCluster > 1) {
    if (threadIdx.x < Layout::kCluster) {
      store_remote(scratch.of_block + cluster_rank(), threadIdx.x, Op::bits(value));
    }
    cluster_arrive();
    cluster_wait();
    value = Op::value(scratch.of_block[0]);
#pragma unroll
    for (int part = 1; part < Layout::kCluster; ++part) {
      value = Op::merge(value, Op::value(scratch.of_block[part]));
    }
  }
  return value;
}

}  // namespace fusedops
