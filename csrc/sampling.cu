// The next token by temperature, top-k and top-p, and the k largest elements of a row.
//
// Where k is not large, one pass over a row finds bounds that let few elements be among the k best,
// and those are all that is looked at again. Other cuts take further passes.

#include "draw.cuh"
#include "pdl.cuh"
#include "row_select.cuh"

namespace fusedops {

constexpr float kBinsPerUnit = 32.0f;

template <int kThreads>
constexpr int kBlocksOfSm = kMostThreads / kThreads;

// Scores are not above 0: the best one is 0, so the bits of their magnitude rank them.
struct ScoreRule {
  static constexpr unsigned kLastKey = 0x7f800000u;
  float best;
  float heat;

  // The maximum is no NaN where an infinite temperature divides an infinite difference.
  __device__ __forceinline__ float convert(float logit) const {
    const float score = heat == 1.0f ? logit - best : (logit - best) / heat;
    return fmaxf(score, -__int_as_float(0x7f800000));
  }

  __device__ __forceinline__ unsigned key(float score) const {
    return __float_as_uint(score) & 0x7fffffffu;
  }
  __device__ __forceinline__ int coarse(float score) const {
    return min(__float2int_rz(-score * kBinsPerUnit), kSelectBins - 1);
  }
  __device__ __forceinline__ void interval(int bin, unsigned& from, unsigned& to) const {
    from = __float_as_uint(static_cast<float>(bin) / kBinsPerUnit);
    to = bin == kSelectBins - 1 ? kLastKey
                                : __float_as_uint(static_cast<float>(bin + 1) / kBinsPerUnit) - 1;
  }
  // The weight of the softmax, before it is divided by their sum, with 40 bits behind the point.
  static __device__ __forceinline__ Mass mass(float score) {
    return __float2ull_rz(expf(score) * 0x1p40f);
  }
};

// Any floats, ranked by key_of_value.
struct ValueRule {
  static constexpr unsigned kLastKey = kLastValueKey;
  float best;
  float scale;

  __device__ __forceinline__ float convert(float value) const { return value; }
  __device__ __forceinline__ unsigned key(float value) const { return key_of_value(value); }
  // Where infinities make this NaN it is 0, and the bits of the keys alone narrow them.
  __device__ __forceinline__ int coarse(float value) const {
    return min(max(__float2int_rz((best - value) * scale), 0), kSelectBins - 1);
  }
  __device__ __forceinline__ Mass mass(float) const { return 0; }
  // The smallest key of bin `bin` or a later one; each lane of a warp tries one place.
  __device__ __forceinline__ unsigned first_key(int bin) const {
    unsigned from = 0;
    unsigned to = kLastKey + 1;
#pragma unroll 1
    while (from < to) {
      const unsigned step = (to - from) / kWarp + 1;
      const Mass place = from + static_cast<Mass>(threadIdx.x % kWarp) * step;
      const bool is_behind =
          place >= to || coarse(value_of_key(static_cast<unsigned>(place))) >= bin;
      const unsigned behind = __ballot_sync(kAllLanes, is_behind);
      const int lane = behind == 0 ? kWarp : __ffs(behind) - 1;
      if (lane == 0) return from;
      const Mass end = min(static_cast<Mass>(to), from + static_cast<Mass>(lane) * step);
      from += (lane - 1) * step + 1;
      to = static_cast<unsigned>(end);
    }
    return from;
  }
  __device__ __forceinline__ void interval(int bin, unsigned& from, unsigned& to) const {
    from = first_key(bin);
    to = bin == kSelectBins - 1 ? kLastKey : first_key(bin + 1) - 1;
  }
};

// The weight of a candidate whose key is one of ScoreRule.
__device__ __forceinline__ Mass mass_of(const SelectMemory& memory, int place) {
  return ScoreRule::mass(-__uint_as_float(static_cast<unsigned>(memory.sorted[place] >> 32)));
}

// The first index whose key is `key`.
template <int kBlocks, int kThreads, typename T>
__device__ __forceinline__ unsigned first_place(SelectMemory& memory, const Piece<T>& piece,
                                                unsigned key) {
  unsigned place = kNoKey;
  visit<kThreads>(piece, [&](float value, int index, bool is_there) {
    if (is_there && key_of_value(value) == key) place = min(place, static_cast<unsigned>(index));
  });
  return join_extents<kBlocks, kThreads>(memory, place, 0, 1).best;
}

// A fraction in units of 2^-40.
__device__ __forceinline__ Mass part_of(float share) {
  return share > 0.0f ? static_cast<Mass>(static_cast<double>(share) * 0x1p40) : 0;
}

// The last bin that the fewest elements with the fraction `part` / 2^40 of all mass may reach, so
// that those behind it need no bins of their own. All together they cannot have the rest of the
// mass, which is at least that rest of what the best ones of the block's threads have.
template <int kThreads>
__device__ __forceinline__ int last_bin_of(SelectMemory& memory, const ScoreRule& rule,
                                           unsigned own_best, Mass part, int length) {
  Mass mass = own_best == kNoKey ? 0 : rule.mass(rule.convert(value_of_key(own_best)));
  unsigned none = 0, no_count;
  Mass all;
  sums_before<kThreads>(memory, none, mass, no_count, all);
  const float rest = static_cast<float>((1ull << 40) - part) * 0x1p-40f;
  const float each = static_cast<float>(all) * 0x1p-40f * rest / static_cast<float>(length);
  // A little lower, as these are rounded; no mass at all gives the last bin.
  return rule.coarse(logf(each) - 1e-3f);
}

template <typename T, int kBlocks, int kThreads>
__global__ void __launch_bounds__(kThreads, kBlocksOfSm<kThreads>)
    sample(const T* logits, const float* temperature, const long long* seed, const int* top_k,
           const float* top_p, long long* tokens, int vocabulary, int chunk, long long row_stride,
           long long column_stride, long long temperature_stride, long long seed_stride,
           long long row_gamma, long long top_k_stride, long long top_p_stride) {
  extern __shared__ uint4 dynamic[];
  SelectMemory& memory = *reinterpret_cast<SelectMemory*>(dynamic);
  pdl_launch_dependents();
  const long long row = blockIdx.x / kBlocks;
  const unsigned block = rank_in_cluster<kBlocks>();
  const Piece<T> piece(logits + row * row_stride, column_stride, vocabulary, chunk, block);
  if (threadIdx.x == 0) memory.in_list = memory.in_owners = 0;
  pdl_wait();
  const float heat = temperature[row * temperature_stride];
  const int kept = top_k == nullptr ? 0 : top_k[row * top_k_stride];
  const float share = top_p == nullptr ? 1.0f : top_p[row * top_p_stride];
  const Noise noise(static_cast<Mass>(seed[row * seed_stride]) +
                    static_cast<Mass>(row) * static_cast<Mass>(row_gamma));
  const bool has_k = kept > 0 && kept < vocabulary;
  const bool has_p = share < 1.0f;
  const bool is_cut = has_k || has_p;

  const unsigned own_best = best_of_thread<kBlocks, kThreads>(piece);
  const Extent extent = join_extents<kBlocks, kThreads>(memory, own_best, has_k ? kept : 0, 0);
  const ScoreRule rule = {value_of_key(extent.best), heat};
  if (!(heat > 0.0f && fabsf(rule.best) < __int_as_float(0x7f800000))) {
    // No distribution: the greedy token. The others may still read this block's extent.
    const unsigned token = first_place<kBlocks, kThreads>(memory, piece, extent.best);
    if (block == 0 && threadIdx.x == 0) tokens[row] = token;
    cluster_barrier<kBlocks>();
    return;
  }

  // Which keys are surely drawn from (those before `first`), which have to be ranked.
  Selection<ScoreRule, T, kBlocks, kThreads> selection(memory, piece, rule);
  Mass most = has_k ? static_cast<Mass>(kept) : ~0ull;
  Mass mass_limit = 0;  // until it is known, and where top-p is off
  bool needs_mass = has_p && !has_k;
  const bool is_listed = has_k && selection.list_quickly(extent, own_best, vocabulary);
  if (has_k && !is_listed) {
    selection.restart_behind(extent, kept);
    bool to_one_key = false;
#pragma unroll 1
    while (true) {
      selection.template select<false>(most, 0, to_one_key);
      const bool fits = selection.before + selection.count <= kCandidates;
      if (!has_p || fits || to_one_key) break;
      to_one_key = true;
    }
    if (has_p && !to_one_key) {
      // The first block ranks all that are left, and adds up their masses itself.
      selection.first = 0;
      selection.count += selection.before;
      selection.before = 0;
    } else if (has_p) {
      // The mass of exactly k elements, and then the share of it among them.
      const unsigned last = selection.first;
      const Mass ties = most - selection.before;
      const Mass total = selection.mass_before_key(last) + ties * rule.mass(-__uint_as_float(last));
      mass_limit = selection.share_of(total, part_of(share));
      selection.restart(last);
      needs_mass = true;
    }
  }
  if (needs_mass) {
    int last_bin = kSelectBins - 1;
    if (!has_k) {
      last_bin = last_bin_of<kThreads>(memory, rule, own_best, part_of(share), vocabulary);
    }
    selection.template select<true>(mass_limit, part_of(share), false, last_bin);
  }

  Winner winner = JoinWinners::empty();
  const bool is_tied = is_cut && !is_listed && selection.count > kCandidates;
  const bool has_sure = !is_cut || is_tied || selection.before > 0;
  if (!is_listed) {
    const bool lists = is_cut && !is_tied;
    const unsigned sure_below = is_cut ? selection.first : kNoKey;
    unsigned ties_before = 0, ties_within = 0;
    if (is_tied) {
      Mass quota = most - selection.before;
      if (mass_limit > 0) {
        const Mass each = rule.mass(-__uint_as_float(selection.first));
        quota = min(quota, (mass_limit - selection.mass_before + each - 1) / each);
      }
      ties_within = static_cast<unsigned>(min(quota, static_cast<Mass>(vocabulary)));
      ties_before = selection.ties_before();
    }
    if (threadIdx.x == 0) memory.in_list = 0;
    __syncthreads();
    Queue queue(memory);
    Approximate seen;
    float bar = __int_as_float(0x7f800000);
    const auto take = [&](float score, int index) {
      const unsigned bits = noise.bits(index);
      const float value = score + Noise::approximate(bits);
      seen.take(value, score, index);
      if (value >= bar) {
        const unsigned key = is_cut ? rule.key(score) : 0u;
        winner = JoinWinners::merge(winner, {score + Noise::exact(bits), key, index});
      }
    };
#pragma unroll 1
    for (int round = 0; round < 2; ++round) {
      if (is_tied) {
        selection.visit_ties(
            ties_before, ties_within, [&](float score, int index, bool is_there, bool is_within) {
              const bool is_sure = is_within || (is_there && rule.key(score) < sure_below);
              queue.push(is_sure, score, index, take);
            });
      } else {
        visit<kThreads>(piece, [&](float logit, int index, bool is_there) {
          const float score = rule.convert(logit);
          const unsigned key = rule.key(score);
          const bool is_sure = is_there && key < sure_below;
          if (lists && round == 0 && is_there && !is_sure && key <= selection.last) {
            append(memory, key, index);
          }
          queue.push(is_sure, score, index, take);
        });
      }
      queue.flush(take);
      if (!has_sure || round == 1) break;
      bar = value_of_key(
                join_extents<kBlocks, kThreads>(memory, key_of_value(seen.value), 0, 1).best) -
            kNoiseSlack;
      // Threads with two in question do not know the second: all look again.
      if (!__syncthreads_or(seen.second >= bar)) {
        if (seen.value >= bar) {
          const unsigned key = is_cut ? rule.key(seen.score) : 0u;
          winner = {seen.score + Noise::exact(noise.bits(seen.index)), key, seen.index};
        }
        break;
      }
    }
    winner = winner_of_block<kThreads>(winner);
    if (threadIdx.x == 0) {
      memory.words[0] = make_uint2(__float_as_uint(winner.value), winner.key);
      memory.words[1] = make_uint2(winner.index, 0);
    }
    cluster_barrier<kBlocks>();
  }
  if (block != 0) {
    cluster_barrier<kBlocks>();  // the first block reads the lists and winners
    return;
  }
  winner = JoinWinners::empty();
  if (!is_listed && has_sure && threadIdx.x < kBlocks) {
    const uint2 words = load_remote<kBlocks>(memory.words, threadIdx.x);
    const uint2 index = load_remote<kBlocks>(memory.words + 1, threadIdx.x);
    winner = {__uint_as_float(words.x), words.y, static_cast<int>(index.x)};
  }
  const int size = is_cut && !is_tied ? collect<kBlocks, kThreads>(memory) : 0;
  cluster_barrier<kBlocks>();
  if (size > 0) {
    sort_candidates<kThreads>(memory, size);
    constexpr int kEach = kCandidates / kThreads;
    const int own = threadIdx.x * kEach;
    Mass mass = 0;
    if (has_p) {
      Mass all_mass;
      unsigned none = 0, no_count;
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        if (own + j < size && selection.before + own + j < most) mass += mass_of(memory, own + j);
      }
      sums_before<kThreads>(memory, none, mass, no_count, all_mass);
      if (mass_limit == 0) mass_limit = selection.share_of(all_mass, part_of(share));
      mass += selection.mass_before;
    } else {
      mass_limit = ~0ull;
    }
#pragma unroll 1
    for (int j = 0; j < kEach; ++j) {
      if (own + j < size && selection.before + own + j < most && mass < mass_limit) {
        const unsigned key = static_cast<unsigned>(memory.sorted[own + j] >> 32);
        const int index = static_cast<int>(memory.sorted[own + j]);
        const float value = -__uint_as_float(key) + Noise::exact(noise.bits(index));
        winner = JoinWinners::merge(winner, {value, key, index});
      }
      if (has_p && own + j < size) mass += mass_of(memory, own + j);
    }
  }
  winner = winner_of_block<kThreads>(winner);
  if (threadIdx.x == 0) tokens[row] = winner.index;
}

// values, indices (rows, k): the k largest of each row in descending order, k <= kCandidates / 2.
template <typename T, int kBlocks, int kThreads>
__global__ void __launch_bounds__(kThreads, kBlocksOfSm<kThreads>)
    top_k(const T* x, T* values, long long* indices, int length, int chunk, int k,
          long long row_stride, long long column_stride) {
  extern __shared__ uint4 dynamic[];
  SelectMemory& memory = *reinterpret_cast<SelectMemory*>(dynamic);
  pdl_launch_dependents();
  const long long row = blockIdx.x / kBlocks;
  const unsigned block = rank_in_cluster<kBlocks>();
  x += row * row_stride;
  const Piece<T> piece(x, column_stride, length, chunk, block);
  if (threadIdx.x == 0) memory.in_list = memory.in_owners = 0;
  pdl_wait();
  const unsigned own_best = best_of_thread<kBlocks, kThreads>(piece);
  const Extent extent = join_extents<kBlocks, kThreads>(memory, own_best, k, 0);
  const float best = value_of_key(extent.best);
  const ValueRule rule = {best, kSelectBins / (best - value_of_key(extent.least))};
  Selection<ValueRule, T, kBlocks, kThreads> selection(memory, piece, rule);
  if (!selection.list_quickly(extent, own_best, length)) {
    selection.restart_behind(extent, k);
    Mass wanted = k;
    selection.template select<false>(wanted, 0, false);
    if (selection.before + selection.count <= kCandidates) {
      selection.list();
    } else {
      selection.template select<false>(wanted, 0, true);
      if (threadIdx.x == 0) memory.in_list = 0;
      selection.visit_ties(selection.ties_before(), k - selection.before,
                           [&](float value, int index, bool is_there, bool is_within) {
                             const unsigned key = rule.key(value);
                             if (is_within || (is_there && key < selection.first)) {
                               append(memory, key, index);
                             }
                           });
    }
    cluster_barrier<kBlocks>();
  }
  if (block != 0) {
    cluster_barrier<kBlocks>();  // the first block reads the lists
    return;
  }
  const int size = collect<kBlocks, kThreads>(memory);
  cluster_barrier<kBlocks>();
  sort_candidates<kThreads>(memory, size);
  for (int i = threadIdx.x; i < k; i += kThreads) {
    const int index = static_cast<int>(memory.sorted[i]);
    values[row * k + i] = x[index * column_stride];
    indices[row * k + i] = index;
  }
}

}  // namespace fusedops
