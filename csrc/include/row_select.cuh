// Selecting from a row by rank: the blocks of a cluster hold the row in shared memory and narrow an
// interval of keys until few elements are left in it, which one block then sorts.
//
// Keys are integers whose ascending order is the rank of the elements; elements of equal key rank
// by index. Everything counted is an integer, so no order of additions changes a result.
#pragma once

#include "cluster.cuh"
#include "row_piece.cuh"

namespace fusedops {

constexpr int kSelectWarps = kSelectThreads / kWarp;
constexpr int kSelectBins = 1024;
constexpr int kCandidates = 2048;
constexpr int kMostBlocks = 8;
constexpr unsigned kAllLanes = 0xffffffffu;

// Sums of weights with 40 bits behind the point, and pairs of a key and an index.
using Mass = unsigned long long;

// What one block keeps; the dynamic shared memory begins with it.
struct alignas(kVecBytes) SelectMemory {
  unsigned counts[kSelectBins];
  unsigned low[kSelectBins];
  unsigned high[kSelectBins];
  Mass list[kCandidates];
  Mass sorted[kCandidates];
  Extent extents[kMostBlocks];
  Extent extent[2];                 // this block's of two joins, for the others to read
  uint2 words[2];                   // likewise
  alignas(uint2) unsigned in_list;  // read as two words by other blocks
  unsigned count_of_warp[kSelectWarps];
  Mass mass_of_warp[kSelectWarps];
  int found_bin;
  unsigned found_count;
  unsigned found_before;
  Mass found_mass;
};

// The sums of the values of the threads before this one; `counts` and `masses` get the totals.
__device__ __forceinline__ void sums_before(SelectMemory& memory, unsigned& count, Mass& mass,
                                            unsigned& counts, Mass& masses) {
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  unsigned count_sum = count;
  Mass mass_sum = mass;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const unsigned other_count = __shfl_up_sync(kAllLanes, count_sum, step);
    const Mass other_mass = __shfl_up_sync(kAllLanes, mass_sum, step);
    if (lane >= step) {
      count_sum += other_count;
      mass_sum += other_mass;
    }
  }
  __syncthreads();
  if (lane == kWarp - 1) {
    memory.count_of_warp[warp] = count_sum;
    memory.mass_of_warp[warp] = mass_sum;
  }
  __syncthreads();
  unsigned count_start = 0;
  Mass mass_start = 0;
  counts = 0;
  masses = 0;
#pragma unroll 1
  for (int i = 0; i < kSelectWarps; ++i) {
    if (i == warp) {
      count_start = counts;
      mass_start = masses;
    }
    counts += memory.count_of_warp[i];
    masses += memory.mass_of_warp[i];
  }
  count = count_start + count_sum - count;
  mass = mass_start + mass_sum - mass;
}

// Joins what the threads of all blocks found; every thread gets the result. Calls without a cluster
// barrier between them need different turns: a block may still read what another one joined before.
template <int kBlocks>
__device__ __forceinline__ Extent join_extents(SelectMemory& memory, Extent extent, int turn) {
  extent = join_lanes<JoinExtents, kSelectThreads>(extent, kSelectThreads);
  if (threadIdx.x == 0) memory.extent[turn] = extent;
  cluster_barrier<kBlocks>();
  constexpr int kParts = sizeof(Extent) / sizeof(uint2);
  if (threadIdx.x < kBlocks * kParts) {
    const int part = threadIdx.x % kParts;
    reinterpret_cast<uint2*>(memory.extents)[threadIdx.x] = load_remote<kBlocks>(
        reinterpret_cast<const uint2*>(memory.extent + turn) + part, threadIdx.x / kParts);
  }
  __syncthreads();
  Extent joined = memory.extents[0];
#pragma unroll
  for (int i = 1; i < kBlocks; ++i) joined = JoinExtents::merge(joined, memory.extents[i]);
  return joined;
}

// The keys first .. last are those that are still in question.
//
// Rule: key(value); coarse(value), bins of the first histogram, ascending with the key;
// mass(value); interval(bin, first, last), the keys of a coarse bin.
template <class Rule, int kBlocks>
struct Selection {
  SelectMemory& memory;
  const Piece& piece;
  const Rule& rule;
  unsigned first;
  unsigned last;
  unsigned before;   // elements with a key below `first`
  Mass mass_before;  // their mass
  unsigned count;    // elements in question
  bool has_counted;

  __device__ __forceinline__ Selection(SelectMemory& memory, const Piece& piece, const Rule& rule)
      : memory(memory), piece(piece), rule(rule) {
    has_counted = false;
    restart(Rule::kLastKey);
  }

  __device__ __forceinline__ void restart(unsigned largest) {
    first = 0;
    last = largest;
    before = 0;
    mass_before = 0;
    count = 0xffffffffu;
  }

  // Narrows the keys to those of one bin, in which the running count (or mass) reaches `limit`.
  // A limit of 0 with kByMass: the fraction `part` / 2^40 of all mass, to which it is set.
  template <bool kByMass>
  __device__ __forceinline__ void narrow(bool is_coarse, Mass& limit, Mass part) {
    if (has_counted) cluster_barrier<kBlocks>();  // others may still read the counters
    has_counted = true;
    const int bits = 32 - __clz(last - first);
    const int shift = max(bits - 10, 0);
    for (int i = threadIdx.x; i < kSelectBins; i += kSelectThreads) {
      memory.counts[i] = 0;
      if (kByMass) memory.low[i] = memory.high[i] = 0;
    }
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i - static_cast<int>(threadIdx.x) < piece.count;
         i += kSelectThreads) {
      bool is_in = i < piece.count;
      const float value = is_in ? piece.held[i] : 0.0f;
      const unsigned key = rule.key(value);
      is_in = is_in && key >= first && key <= last;
      const int bin = is_coarse ? rule.coarse(value) : static_cast<int>((key - first) >> shift);
      if constexpr (kByMass) {
        add_mass(is_in, bin, is_in ? rule.mass(value) : 0);
      } else if (is_in) {
        atomicAdd(memory.counts + bin, 1u);
      }
    }
    cluster_barrier<kBlocks>();
    // Two neighbouring bins a thread.
    const int own = 2 * threadIdx.x;
    unsigned counts[2] = {0, 0};
    Mass masses[2] = {0, 0};
#pragma unroll
    for (int rank = 0; rank < kBlocks; ++rank) {
      const uint2 pair =
          load_remote<kBlocks>(reinterpret_cast<const uint2*>(memory.counts + own), rank);
      counts[0] += pair.x;
      counts[1] += pair.y;
      if constexpr (kByMass) {
        const uint2 low =
            load_remote<kBlocks>(reinterpret_cast<const uint2*>(memory.low + own), rank);
        const uint2 high =
            load_remote<kBlocks>(reinterpret_cast<const uint2*>(memory.high + own), rank);
        masses[0] += static_cast<Mass>(high.x) << 32 | low.x;
        masses[1] += static_cast<Mass>(high.y) << 32 | low.y;
      }
    }
    unsigned count_sum = counts[0] + counts[1];
    Mass mass_sum = masses[0] + masses[1];
    unsigned all_counts;
    Mass all_masses;
    sums_before(memory, count_sum, mass_sum, all_counts, all_masses);
    if constexpr (kByMass) {
      if (limit == 0) limit = share_of(all_masses, part);
    }
    const Mass wanted = limit - (kByMass ? mass_before : before);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const Mass start = kByMass ? mass_sum : count_sum;
      const Mass size = kByMass ? masses[j] : counts[j];
      if (start < wanted && start + size >= wanted) {
        memory.found_bin = own + j;
        memory.found_count = counts[j];
        memory.found_before = count_sum;
        memory.found_mass = mass_sum;
      }
      count_sum += counts[j];
      mass_sum += masses[j];
    }
    __syncthreads();
    const int bin = memory.found_bin;
    before += memory.found_before;
    mass_before += memory.found_mass;
    count = memory.found_count;
    if (is_coarse) {
      unsigned from, to;
      rule.interval(bin, from, to);
      first = max(first, from);
      last = min(last, to);
    } else {
      first += static_cast<unsigned>(bin) << shift;
      last = min(last, first + ((1u << shift) - 1u));
    }
  }

  // Narrows until at most kCandidates elements, or one key, are in question; or one key anyway.
  template <bool kByMass>
  __device__ __forceinline__ void select(Mass& limit, Mass part, bool to_one_key) {
    bool is_coarse = count == 0xffffffffu;
#pragma unroll 1
    while (is_coarse || (first < last && (to_one_key || count > kCandidates))) {
      narrow<kByMass>(is_coarse, limit, part);
      is_coarse = false;
    }
  }

  // The least mass that is not below the fraction part / 2^40 of `all`; at least 1, so that the
  // first element is always within.
  static __device__ __forceinline__ Mass share_of(Mass all, Mass part) {
    const Mass high = __umul64hi(all, part);
    const Mass low = all * part;
    const Mass share = (high << 24 | low >> 40) + ((low & ((1ull << 40) - 1)) != 0);
    return share == 0 ? 1 : share;
  }

  __device__ __forceinline__ void add_mass(bool is_in, int bin, Mass mass) {
    // A row of equal values would have its lanes wait for one another.
    const int common = __shfl_sync(kAllLanes, bin, 0);
    if (__all_sync(kAllLanes, is_in && bin == common)) {
      const unsigned low = __reduce_add_sync(kAllLanes, static_cast<unsigned>(mass & 0xfffffu));
      const unsigned high = __reduce_add_sync(kAllLanes, static_cast<unsigned>(mass >> 20));
      is_in = threadIdx.x % kWarp == 0;
      mass = (static_cast<Mass>(high) << 20) + low;
      if (is_in) atomicAdd(memory.counts + bin, static_cast<unsigned>(kWarp));
    } else if (is_in) {
      atomicAdd(memory.counts + bin, 1u);
    }
    if (is_in) {
      // 64 bits as two words, the carry between them by hand: 32-bit additions are one instruction.
      const unsigned low = static_cast<unsigned>(mass);
      const unsigned old = atomicAdd(memory.low + bin, low);
      const unsigned high = static_cast<unsigned>(mass >> 32) + (old + low < old ? 1u : 0u);
      if (high != 0) atomicAdd(memory.high + bin, high);
    }
  }

  // Lists the elements of this block with keys in question.
  __device__ __forceinline__ void list() {
    if (threadIdx.x == 0) memory.in_list = 0;
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < piece.count; i += kSelectThreads) {
      const unsigned key = rule.key(piece.held[i]);
      if (key >= first && key <= last) append(key, piece.begin + i);
    }
  }

  __device__ __forceinline__ void append(unsigned key, int index) {
    memory.list[atomicAdd(&memory.in_list, 1u)] = static_cast<Mass>(key) << 32 | index;
  }

  // Calls each(i, is_tie_within) for the block's elements in order, all threads together; of the
  // elements whose key is `first`, the first `quota` of the row are within.
  template <class Each>
  __device__ __forceinline__ void visit_ties(unsigned quota, Each each) {
    unsigned own = 0;
    for (int i = threadIdx.x; i < piece.count; i += kSelectThreads) {
      own += rule.key(piece.held[i]) == first;
    }
    Mass none = 0, no_mass;
    unsigned all;
    sums_before(memory, own, none, all, no_mass);
    if (threadIdx.x == 0) memory.words[1] = make_uint2(all, 0);
    cluster_barrier<kBlocks>();
    unsigned start = 0;
    const unsigned me = rank_in_cluster<kBlocks>();
    for (unsigned rank = 0; rank < me; ++rank) {
      start += load_remote<kBlocks>(memory.words + 1, rank).x;
    }
#pragma unroll 1
    for (int base = 0; base < piece.count; base += kSelectThreads) {
      const int i = base + threadIdx.x;
      const bool is_tie = i < piece.count && rule.key(piece.held[i]) == first;
      unsigned rank = is_tie;
      sums_before(memory, rank, none, all, no_mass);
      if (i < piece.count) each(i, is_tie && start + rank < quota);
      start += all;
    }
  }

  // Copies the lists of all blocks into this one's `sorted`; returns how many there are. The lists
  // must be complete, and their blocks must stay until a barrier behind this.
  __device__ __forceinline__ int collect() {
    int size = 0;
#pragma unroll 1
    for (int rank = 0; rank < kBlocks; ++rank) {
      const unsigned part =
          load_remote<kBlocks>(reinterpret_cast<const uint2*>(&memory.in_list), rank).x;
      for (unsigned i = threadIdx.x; i < part; i += kSelectThreads) {
        reinterpret_cast<uint2*>(memory.sorted)[size + i] =
            load_remote<kBlocks>(reinterpret_cast<const uint2*>(memory.list) + i, rank);
      }
      size += part;
    }
    return size;
  }

  // Sorts the first `size` of `sorted` (Batcher, "Sorting networks and their applications", 1968).
  __device__ __forceinline__ void sort(int size) {
    const int padded = size <= 2 ? 2 : 1 << (32 - __clz(size - 1));
    for (int i = size + threadIdx.x; i < padded; i += kSelectThreads) memory.sorted[i] = ~0ull;
    __syncthreads();
#pragma unroll 1
    for (int run = 2; run <= padded; run *= 2) {
#pragma unroll 1
      for (int step = run / 2; step > 0; step /= 2) {
        for (int pair = threadIdx.x; pair < padded / 2; pair += kSelectThreads) {
          const int low = pair / step * 2 * step + pair % step;
          const Mass a = memory.sorted[low];
          const Mass b = memory.sorted[low + step];
          if ((a > b) == ((low & run) == 0)) {
            memory.sorted[low] = b;
            memory.sorted[low + step] = a;
          }
        }
        __syncthreads();
      }
    }
  }
};

}  // namespace fusedops
