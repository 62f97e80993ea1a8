// Selecting from a row by rank: the blocks of a cluster narrow an interval of keys until few
// elements are left in it, which one block then sorts. A pass over the row takes ten bits off it.
//
// Elements of equal key rank by index. Everything counted is an integer, so no order of additions
// changes a result.
#pragma once

#include "candidates.cuh"

namespace fusedops {

// The keys first .. last are those that are still in question.
//
// Rule: convert(element), which is a value; key(value); coarse(value), bins of the first histogram,
// ascending with the key; mass(value); interval(bin, first, last), the keys of a coarse bin.
template <class Rule, typename T, int kBlocks, int kThreads>
struct Selection {
  SelectMemory& memory;
  const Piece<T>& piece;
  const Rule& rule;
  unsigned first;
  unsigned last;
  unsigned before;   // elements with a key below `first`
  Mass mass_before;  // their mass
  unsigned count;    // elements in question
  bool has_counted;

  __device__ __forceinline__ Selection(SelectMemory& memory, const Piece<T>& piece,
                                       const Rule& rule)
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

  // As many elements as threads have any are not behind the last of their best ones.
  __device__ __forceinline__ void restart_behind(const Extent& extent, int k) {
    const bool is_bound = extent.least != kNoKey && k <= kBlocks * kThreads;
    restart(is_bound ? rule.key(rule.convert(value_of_key(extent.least))) : Rule::kLastKey);
  }

  // Lists what is not behind the bounds of `extent`, where that is little; `own` is the best key of
  // this thread's elements. Otherwise nothing but the lists has changed.
  __device__ __forceinline__ bool list_quickly(const Extent& extent, unsigned own, int length) {
    const unsigned bound = min(extent.near, extent.far);
    if (bound == kNoKey && length > kCandidates) return false;
    const auto key_of = [&](float element) { return rule.key(rule.convert(element)); };
    const unsigned to = bound == kNoKey ? kNoKey : key_of(value_of_key(bound));
    const bool is_owner = own != kNoKey && key_of(value_of_key(own)) <= to;
    list_of_owners<kThreads>(memory, piece, is_owner, to, key_of);
    cluster_barrier<kBlocks>();
    const unsigned all = listed<kBlocks>(memory);
    if (all > kCandidates) return false;
    count = all;
    return true;
  }

  // Narrows the keys to those of one bin, in which the running count (or mass) reaches `limit`.
  // A limit of 0 with kByMass: the fraction `part` / 2^40 of all mass, to which it is set. The bins
  // behind `last_bin`, before which the caller knows that the limit is reached, are one.
  template <bool kByMass>
  __device__ __forceinline__ void narrow(bool is_coarse, Mass& limit, Mass part, int last_bin) {
    if (has_counted) cluster_barrier<kBlocks>();  // others may still read the counters
    has_counted = true;
    const int bits = 32 - __clz(last - first);
    const int shift = max(bits - 10, 0);
    for (int i = threadIdx.x; i < kSelectBins; i += kThreads) {
      memory.counts[i] = 0;
      if (kByMass) memory.low[i] = memory.high[i] = 0;
    }
    __syncthreads();
    Mass rest = 0;
    visit<kThreads>(piece, [&](float element, int, bool is_there) {
      const float value = rule.convert(element);
      const unsigned key = rule.key(value);
      bool is_in = is_there && key >= first && key <= last;
      const int bin = is_coarse ? rule.coarse(value) : static_cast<int>((key - first) >> shift);
      if constexpr (kByMass) {
        const Mass mass = is_in ? rule.mass(value) : 0;
        if (bin > last_bin) {
          rest += mass;
          is_in = false;
        }
        add_mass(is_in, bin, mass);
      } else if (is_in) {
        atomicAdd(memory.counts + bin, 1u);
      }
    });
    if constexpr (kByMass) add_rest(rest);
    cluster_barrier<kBlocks>();
    constexpr int kEach = kSelectBins / kThreads;
    const int own = kEach * threadIdx.x;
    unsigned counts[kEach] = {};
    Mass masses[kEach] = {};
    unsigned count_sum = 0;
    Mass mass_sum = 0;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      counts[j] = static_cast<unsigned>(sum_of_blocks(memory.counts, own + j));
      if constexpr (kByMass) {
        masses[j] =
            sum_of_blocks(memory.low, own + j) + (sum_of_blocks(memory.high, own + j) << 32);
      }
      count_sum += counts[j];
      mass_sum += masses[j];
    }
    unsigned all_counts;
    Mass all_masses;
    sums_before<kThreads>(memory, count_sum, mass_sum, all_counts, all_masses);
    if constexpr (kByMass) {
      if (limit == 0) limit = share_of(all_masses, part);
    }
    const Mass wanted = limit - (kByMass ? mass_before : before);
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
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
  __device__ __forceinline__ void select(Mass& limit, Mass part, bool to_one_key,
                                         int last_bin = kSelectBins - 1) {
    bool is_coarse = count == 0xffffffffu;
#pragma unroll 1
    while (is_coarse || (first < last && (to_one_key || count > kCandidates))) {
      narrow<kByMass>(is_coarse, limit, part, is_coarse ? last_bin : kSelectBins - 1);
      is_coarse = false;
    }
  }

  // The sum of what the blocks have at place `bin` of the array that lies at `local` in each.
  __device__ __forceinline__ Mass sum_of_blocks(const unsigned* local, int bin) {
    Mass sum = 0;
#pragma unroll
    for (int rank = 0; rank < kBlocks; ++rank) {
      // Other blocks' memory is read by two words.
      const uint2 two = load_remote<kBlocks>(reinterpret_cast<const uint2*>(local) + bin / 2, rank);
      sum += bin % 2 == 0 ? two.x : two.y;
    }
    return sum;
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

  // Adds what is in no bin to the last one, so that the bins together have all mass.
  __device__ __forceinline__ void add_rest(Mass rest) {
    unsigned none = 0, no_count;
    Mass all;
    sums_before<kThreads>(memory, none, rest, no_count, all);
    if (threadIdx.x == 0) {
      const Mass sum = (static_cast<Mass>(memory.high[kSelectBins - 1]) << 32) +
                       memory.low[kSelectBins - 1] + all;
      memory.low[kSelectBins - 1] = static_cast<unsigned>(sum);
      memory.high[kSelectBins - 1] = static_cast<unsigned>(sum >> 32);
    }
  }

  // The mass of all elements with a key below `key`.
  __device__ __forceinline__ Mass mass_before_key(unsigned key) {
    Mass mass = 0, sum;
    unsigned none = 0, no_count;
    visit<kThreads>(piece, [&](float element, int, bool is_there) {
      const float value = rule.convert(element);
      if (is_there && rule.key(value) < key) mass += rule.mass(value);
    });
    sums_before<kThreads>(memory, none, mass, no_count, sum);
    if (threadIdx.x == 0) {
      memory.words[0] = make_uint2(static_cast<unsigned>(sum), static_cast<unsigned>(sum >> 32));
    }
    cluster_barrier<kBlocks>();
    Mass all = 0;
#pragma unroll
    for (int rank = 0; rank < kBlocks; ++rank) {
      const uint2 words = load_remote<kBlocks>(memory.words, rank);
      all += static_cast<Mass>(words.y) << 32 | words.x;
    }
    return all;
  }

  // Lists the elements with keys up to `last`.
  __device__ __forceinline__ void list() {
    if (threadIdx.x == 0) memory.in_list = 0;
    __syncthreads();
    visit<kThreads>(piece, [&](float element, int index, bool is_there) {
      const unsigned key = rule.key(rule.convert(element));
      if (is_there && key <= last) append(memory, key, index);
    });
  }

  // How many elements of the blocks before this one have the key `first`.
  __device__ __forceinline__ unsigned ties_before() {
    unsigned own = 0, all;
    visit<kThreads>(piece, [&](float element, int, bool is_there) {
      own += is_there && rule.key(rule.convert(element)) == first;
    });
    Mass none = 0, no_mass;
    sums_before<kThreads>(memory, own, none, all, no_mass);
    if (threadIdx.x == 0) memory.words[1] = make_uint2(all, 0);
    cluster_barrier<kBlocks>();
    unsigned sum = 0;
    const unsigned me = rank_in_cluster<kBlocks>();
    for (unsigned rank = 0; rank < me; ++rank) {
      sum += load_remote<kBlocks>(memory.words + 1, rank).x;
    }
    return sum;
  }

  // Calls each(value, index, is_there, is_tie_within) for the block's elements in order, all
  // threads together; of the elements whose key is `first`, the first `quota` of the row are
  // within. `start`: those of the blocks before this one.
  template <class Each>
  __device__ __forceinline__ void visit_ties(unsigned start, unsigned quota, Each each) {
#pragma unroll 1
    for (int base = 0; base < piece.count; base += kThreads) {
      const int place = base + threadIdx.x;
      const bool is_there = place < piece.count;
      const float value = rule.convert(is_there ? piece.at(place) : 0.0f);
      const bool is_tie = is_there && rule.key(value) == first;
      unsigned rank = is_tie, all;
      Mass none = 0, no_mass;
      sums_before<kThreads>(memory, rank, none, all, no_mass);
      each(value, piece.begin + place, is_there, is_tie && start + rank < quota);
      start += all;
    }
  }
};

}  // namespace fusedops
