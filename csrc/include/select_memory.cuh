// What the blocks of a cluster keep while they select from a row, and what they learn of it while
// they read it first: the best element, and bounds that many elements are not behind.
//
// Keys are integers whose ascending order is the rank of the elements.
#pragma once

#include "cluster.cuh"
#include "ptx.cuh"
#include "row_piece.cuh"

namespace fusedops {

constexpr int kMostThreads = 1024;
constexpr int kMostSelectWarps = kMostThreads / kWarp;
constexpr int kSelectBins = 1024;
constexpr int kCandidates = 2048;
constexpr int kMostBlocks = 8;
constexpr int kGroups = 128;
constexpr unsigned kNoKey = 0xffffffffu;

// Sums of weights with 40 bits behind the point, and pairs of a key and an index.
using Mass = unsigned long long;

// The keys of any floats, the largest first, a NaN before all; 0.0 equals -0.0.
constexpr unsigned kLastValueKey = 0xff800000u;  // of -inf

__device__ __forceinline__ unsigned key_of_value(float value) {
  const unsigned bits = __float_as_uint(value + 0.0f);
  const unsigned flip = static_cast<unsigned>(static_cast<int>(bits) >> 31) | 0x80000000u;
  return value == value ? ~(bits ^ flip) : 0u;
}

__device__ __forceinline__ float value_of_key(unsigned key) {
  const unsigned flipped = ~key;
  return __uint_as_float(flipped & 0x80000000u ? flipped ^ 0x80000000u : ~flipped);
}

// Keys of a row: the best one; the best ones of its threads' last; and two bounds for k elements.
// A block has k groups of threads whose best ones are not behind `near`; each block has its share
// of k groups whose best ones are not behind `far`. kNoKey where there are fewer.
struct Extent {
  unsigned best;
  unsigned least;
  unsigned near;
  unsigned far;
};

struct alignas(kVecBytes) SelectMemory {
  unsigned counts[kSelectBins];
  unsigned low[kSelectBins];
  unsigned high[kSelectBins];
  Mass list[kCandidates];
  Mass sorted[kCandidates];  // before that, what warps queue
  alignas(kVecBytes) unsigned groups[kGroups];
  alignas(kVecBytes) Extent extents[kMostBlocks];
  Extent extent[2];                 // this block's of two joins, for the others to read
  uint2 words[2];                   // likewise
  alignas(uint2) unsigned in_list;  // read as two words by other blocks
  unsigned in_owners;
  unsigned short owners[kMostThreads];
  unsigned best_of_warp[kMostSelectWarps];
  unsigned least_of_warp[kMostSelectWarps];
  unsigned count_of_warp[kMostSelectWarps];
  Mass mass_of_warp[kMostSelectWarps];
  int found_bin;
  unsigned found_count;
  unsigned found_before;
  Mass found_mass;
};

// The sums of the values of the lanes up to this one.
__device__ __forceinline__ void sums_of_lanes(unsigned& count, Mass& mass) {
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const unsigned other_count = __shfl_up_sync(kAllLanes, count, step);
    const Mass other_mass = __shfl_up_sync(kAllLanes, mass, step);
    if (threadIdx.x % kWarp >= step) {
      count += other_count;
      mass += other_mass;
    }
  }
}

// The sums of the values of the threads before this one; `counts` and `masses` get the totals.
template <int kThreads>
__device__ __forceinline__ void sums_before(SelectMemory& memory, unsigned& count, Mass& mass,
                                            unsigned& counts, Mass& masses) {
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  unsigned count_sum = count;
  Mass mass_sum = mass;
  sums_of_lanes(count_sum, mass_sum);
  __syncthreads();
  if (lane == kWarp - 1) {
    memory.count_of_warp[warp] = count_sum;
    memory.mass_of_warp[warp] = mass_sum;
  }
  __syncthreads();
  constexpr int kWarps = kThreads / kWarp;
  unsigned warps_count = lane < kWarps ? memory.count_of_warp[lane] : 0;
  Mass warps_mass = lane < kWarps ? memory.mass_of_warp[lane] : 0;
  sums_of_lanes(warps_count, warps_mass);
  counts = __shfl_sync(kAllLanes, warps_count, kWarp - 1);
  masses = __shfl_sync(kAllLanes, warps_mass, kWarp - 1);
  const unsigned count_start = __shfl_sync(kAllLanes, warps_count, max(warp - 1, 0));
  const Mass mass_start = __shfl_sync(kAllLanes, warps_mass, max(warp - 1, 0));
  count = (warp == 0 ? 0 : count_start) + count_sum - count;
  mass = (warp == 0 ? 0 : mass_start) + mass_sum - mass;
}

// The place of this thread's group among the block's, by their keys; the lower one at a tie.
template <int kThreads>
__device__ __forceinline__ int rank_of_group(const SelectMemory& memory, unsigned key) {
  constexpr int kLanes = kThreads / kGroups;
  const int own = threadIdx.x / kLanes;
  int rank = 0;
#pragma unroll
  for (int i = 0; i < kGroups / 4 / kLanes; ++i) {
    const int four = i * kLanes + threadIdx.x % kLanes;
    const uint4 keys = reinterpret_cast<const uint4*>(memory.groups)[four];
    const auto is_before = [&](unsigned other, int j) {
      return other < key || (other == key && 4 * four + j < own);
    };
    rank +=
        is_before(keys.x, 0) + is_before(keys.y, 1) + is_before(keys.z, 2) + is_before(keys.w, 3);
  }
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) rank += __shfl_xor_sync(kAllLanes, rank, step);
  return rank;
}

// The extent of the row from the best keys of the threads of all blocks; `k` 0: without bounds.
// Calls without a cluster barrier between them need different turns: a block may still read what
// another one joined before.
template <int kBlocks, int kThreads>
__device__ __forceinline__ Extent join_extents(SelectMemory& memory, unsigned key, int k,
                                               int turn) {
  constexpr int kLanes = kThreads / kGroups;
  static_assert(kLanes >= 1 && kLanes <= kWarp, "a group is within a warp");
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  unsigned group = key;
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) {
    group = min(group, __shfl_xor_sync(kAllLanes, group, step));
  }
  const unsigned best_of_warp = __reduce_min_sync(kAllLanes, group);
  const unsigned least_of_warp = __reduce_max_sync(kAllLanes, key);
  if (threadIdx.x % kLanes == 0) memory.groups[threadIdx.x / kLanes] = group;
  if (lane == 0) {
    memory.best_of_warp[warp] = best_of_warp;
    memory.least_of_warp[warp] = least_of_warp;
  }
  if (threadIdx.x == 0) memory.extent[turn] = {kNoKey, 0, kNoKey, kNoKey};
  __syncthreads();
  if (warp == 0) {
    constexpr int kWarps = kThreads / kWarp;
    const unsigned best = __reduce_min_sync(kAllLanes, memory.best_of_warp[lane % kWarps]);
    const unsigned least = __reduce_max_sync(kAllLanes, memory.least_of_warp[lane % kWarps]);
    if (lane == 0) {
      memory.extent[turn].best = best;
      memory.extent[turn].least = least;
    }
  }
  const int share = (k + kBlocks - 1) / kBlocks;
  if (k > 0 && share <= kGroups) {
    const int rank = rank_of_group<kThreads>(memory, group);
    if (threadIdx.x % kLanes == 0) {
      if (rank == k - 1) memory.extent[turn].near = group;
      if (rank == share - 1) memory.extent[turn].far = group;
    }
  }
  cluster_barrier<kBlocks>();
  if constexpr (kBlocks == 1) return memory.extent[turn];
  constexpr int kParts = sizeof(Extent) / sizeof(uint2);
  if (threadIdx.x < kBlocks * kParts) {
    const int part = threadIdx.x % kParts;
    reinterpret_cast<uint2*>(memory.extents)[threadIdx.x] = load_remote<kBlocks>(
        reinterpret_cast<const uint2*>(memory.extent + turn) + part, threadIdx.x / kParts);
  }
  __syncthreads();
  Extent joined = memory.extents[0];
#pragma unroll
  for (int i = 1; i < kBlocks; ++i) {
    const Extent other = memory.extents[i];
    joined = {min(joined.best, other.best), max(joined.least, other.least),
              min(joined.near, other.near), max(joined.far, other.far)};
  }
  return joined;
}

// The best key of a thread's elements; kNoKey without any.
template <int kBlocks, int kThreads, typename T>
__device__ __forceinline__ unsigned best_of_thread(const Piece<T>& piece) {
  float best = -__int_as_float(0x7f800000);
  // Pieces of large clusters are short, and more loads in flight would cost registers.
  constexpr int kLoads = kBlocks == 8 ? 4 : 8;
  sweep<kThreads, kLoads>(piece, [&](float value) { best = max_nan(best, value); });
  const bool has_any = static_cast<int>(threadIdx.x) < max(piece.vectors, piece.ends());
  return has_any ? key_of_value(best) : kNoKey;
}

}  // namespace fusedops
