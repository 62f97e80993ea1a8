// The next token by temperature, top-k and top-p, and the k largest elements of a row.
//
// A cluster reads a row once and holds it in shared memory; every further pass is over that.
// Drawing is the argmax of score + noise: a quick approximation of the noise rules out all but a
// few, for which it is computed exactly.

#include "noise.cuh"
#include "pdl.cuh"
#include "row_select.cuh"

namespace fusedops {

constexpr float kBinsPerUnit = 32.0f;

// Scores are not above 0: the best one is 0, so the bits of their magnitude rank them.
struct ScoreRule {
  static constexpr unsigned kLastKey = 0x7f800000u;

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
  __device__ __forceinline__ Mass mass(float score) const {
    return __float2ull_rz(expf(score) * 0x1p40f);
  }
};

// Any floats, the largest first, a NaN before all; 0.0 equals -0.0.
struct ValueRule {
  static constexpr unsigned kLastKey = 0xff800000u;  // of -inf
  float best;
  float scale;

  __device__ __forceinline__ unsigned key(float value) const {
    const unsigned bits = __float_as_uint(value + 0.0f);
    const unsigned flip = static_cast<unsigned>(static_cast<int>(bits) >> 31) | 0x80000000u;
    return value == value ? ~(bits ^ flip) : 0u;
  }
  // Where infinities make this NaN it is 0, and the bits of the keys alone narrow them.
  __device__ __forceinline__ int coarse(float value) const {
    return min(max(__float2int_rz((best - value) * scale), 0), kSelectBins - 1);
  }
  __device__ __forceinline__ Mass mass(float) const { return 0; }
  __device__ __forceinline__ float value_of(unsigned key) const {
    const unsigned flipped = ~key;
    return __uint_as_float(flipped & 0x80000000u ? flipped ^ 0x80000000u : ~flipped);
  }
  // The smallest key of bin `bin` or a later one; each lane of a warp tries one place.
  __device__ __forceinline__ unsigned first_key(int bin) const {
    unsigned from = 0;
    unsigned to = kLastKey + 1;
#pragma unroll 1
    while (from < to) {
      const unsigned step = (to - from) / kWarp + 1;
      const Mass place = from + static_cast<Mass>(threadIdx.x % kWarp) * step;
      const bool is_behind = place >= to || coarse(value_of(static_cast<unsigned>(place))) >= bin;
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

// Who is drawn: the largest value; at a tie the better rank.
struct Winner {
  float value;
  unsigned key;
  int index;
  int unused;
};

struct JoinWinners {
  using Acc = Winner;
  static __device__ __forceinline__ Winner empty() {
    return {-__int_as_float(0x7f800000), 0xffffffffu, 0x7fffffff, 0};
  }
  static __device__ __forceinline__ Winner merge(const Winner& a, const Winner& b) {
    const bool takes_a =
        a.value > b.value ||
        (a.value == b.value && (a.key < b.key || (a.key == b.key && a.index < b.index)));
    return takes_a ? a : b;
  }
};

template <int kBlocks>
__device__ __forceinline__ Piece piece_of(void* memory, int length, int chunk) {
  const int begin = min(static_cast<int>(rank_in_cluster<kBlocks>()) * chunk, length);
  float* held = reinterpret_cast<float*>(static_cast<char*>(memory) + sizeof(SelectMemory));
  return {held, begin, min(chunk, length - begin)};
}

template <typename T, int kBlocks>
__global__ void __launch_bounds__(kSelectThreads, 2)
    sample(const T* logits, const float* temperature, const long long* seed, const int* top_k,
           const float* top_p, long long* tokens, int vocabulary, int chunk, long long row_stride,
           long long column_stride, long long temperature_stride, long long seed_stride,
           long long row_gamma, long long top_k_stride, long long top_p_stride) {
  extern __shared__ uint4 dynamic[];
  SelectMemory& memory = *reinterpret_cast<SelectMemory*>(dynamic);
  pdl_launch_dependents();
  const long long row = blockIdx.x / kBlocks;
  const bool is_first_block = rank_in_cluster<kBlocks>() == 0;
  const T* x = logits + row * row_stride;
  Piece piece = piece_of<kBlocks>(dynamic, vocabulary, chunk);
  pdl_wait();
  const Extent loaded = load_piece(piece, x, column_stride);
  const Extent extent = join_extents<kBlocks>(memory, loaded, 0);
  const float heat = temperature[row * temperature_stride];
  const float best = extent.best;
  if (!(heat > 0.0f && fabsf(best) < __int_as_float(0x7f800000))) {
    // No distribution: the greedy token. The others may still read this block's extent.
    if (is_first_block && threadIdx.x == 0) tokens[row] = extent.place;
    cluster_barrier<kBlocks>();
    return;
  }
  const float lowest = -__int_as_float(0x7f800000);
  const auto score_of = [&](float logit) {
    // The maximum is no NaN where an infinite temperature divides an infinite difference.
    return fmaxf(heat == 1.0f ? logit - best : (logit - best) / heat, lowest);
  };
#pragma unroll 4
  for (int i = threadIdx.x; i < piece.count; i += kSelectThreads) {
    piece.held[i] = score_of(piece.held[i]);
  }
  const Noise noise(static_cast<Mass>(seed[row * seed_stride]) +
                    static_cast<Mass>(row) * static_cast<Mass>(row_gamma));
  const int kept = top_k == nullptr ? 0 : top_k[row * top_k_stride];
  const float share = top_p == nullptr ? 1.0f : top_p[row * top_p_stride];
  const bool has_k = kept > 0 && kept < vocabulary;
  const bool has_p = share < 1.0f;
  const bool is_cut = has_k || has_p;
  const Mass part = share > 0.0f ? static_cast<Mass>(static_cast<double>(share) * 0x1p40) : 0;

  // Which keys are surely drawn from (those before `first`), which have to be ranked.
  const ScoreRule rule;
  Selection<ScoreRule, kBlocks> selection(memory, piece, rule);
  Mass most = has_k ? static_cast<Mass>(kept) : ~0ull;
  Mass mass_limit = 0;
  bool needs_mass = has_p && !has_k;
  if (has_k) {
    // As many elements as threads have any are not below the smallest of their best ones.
    if (kept <= extent.threads) selection.restart(rule.key(score_of(extent.least)));
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
      Mass mass = 0, all_mass;
      unsigned none = 0, no_count;
#pragma unroll 1
      for (int i = threadIdx.x; i < piece.count; i += kSelectThreads) {
        if (rule.key(piece.held[i]) < last) mass += rule.mass(piece.held[i]);
      }
      sums_before(memory, none, mass, no_count, all_mass);
      if (threadIdx.x == 0) {
        memory.words[0] =
            make_uint2(static_cast<unsigned>(all_mass), static_cast<unsigned>(all_mass >> 32));
      }
      cluster_barrier<kBlocks>();
      Mass total = ties * rule.mass(-__uint_as_float(last));
#pragma unroll 1
      for (int rank = 0; rank < kBlocks; ++rank) {
        const uint2 words = load_remote<kBlocks>(memory.words, rank);
        total += static_cast<Mass>(words.y) << 32 | words.x;
      }
      mass_limit = Selection<ScoreRule, kBlocks>::share_of(total, part);
      selection.restart(last);
      needs_mass = true;
    }
  }
  if (needs_mass) selection.template select<true>(mass_limit, part, false);
  const bool is_tied = is_cut && selection.count > kCandidates;
  const bool has_sure = !is_cut || is_tied || selection.before > 0;
  if (is_cut && !is_tied) selection.list();

  Winner winner = JoinWinners::empty();
  if (has_sure) {
    Extent top = JoinExtents::empty();
    const auto approximate = [&](int i, bool is_sure) {
      const float value = is_sure ? piece.held[i] + Noise::approximate(noise.bits(piece.begin + i))
                                  : -__int_as_float(0x7f800000);
      piece.held[i] = value;
      top.best = fmaxf(top.best, value);
    };
    if (is_tied) {
      Mass quota = most - selection.before;
      if (needs_mass) {
        const Mass each = rule.mass(-__uint_as_float(selection.first));
        quota = min(quota, (mass_limit - selection.mass_before + each - 1) / each);
      }
      const unsigned within = static_cast<unsigned>(min(quota, static_cast<Mass>(vocabulary)));
      selection.visit_ties(within, [&](int i, bool is_within) {
        approximate(i, is_within || rule.key(piece.held[i]) < selection.first);
      });
    } else {
      const unsigned below = is_cut ? selection.first : 0xffffffffu;
#pragma unroll 2
      for (int i = threadIdx.x; i < piece.count; i += kSelectThreads) {
        approximate(i, rule.key(piece.held[i]) < below);
      }
    }
    const float bar = join_extents<kBlocks>(memory, top, 1).best - kNoiseSlack;
#pragma unroll 1
    for (int i = threadIdx.x; i < piece.count; i += kSelectThreads) {
      if (piece.held[i] >= bar) {
        const int index = piece.begin + i;
        const float score = score_of(to_float(x[index * column_stride]));
        winner = JoinWinners::merge(winner, {score + Noise::exact(noise.bits(index)),
                                             is_cut ? rule.key(score) : 0u, index, 0});
      }
    }
    winner = join_lanes<JoinWinners, kSelectThreads>(winner, kSelectThreads);
    if (threadIdx.x == 0) {
      memory.words[0] = make_uint2(__float_as_uint(winner.value), winner.key);
      memory.words[1] = make_uint2(winner.index, 0);
    }
  }
  cluster_barrier<kBlocks>();
  if (!is_first_block) {
    cluster_barrier<kBlocks>();  // the first block reads the lists and winners
    return;
  }
  winner = JoinWinners::empty();
  if (has_sure && threadIdx.x < kBlocks) {
    const uint2 words = load_remote<kBlocks>(memory.words, threadIdx.x);
    const uint2 index = load_remote<kBlocks>(memory.words + 1, threadIdx.x);
    winner = {__uint_as_float(words.x), words.y, static_cast<int>(index.x), 0};
  }
  const int size = is_cut && !is_tied ? selection.collect() : 0;
  cluster_barrier<kBlocks>();
  if (size > 0) {
    selection.sort(size);
    constexpr int kEach = kCandidates / kSelectThreads;
    const int own = threadIdx.x * kEach;
    Mass masses[kEach];
    Mass mass = 0, all_mass;
    unsigned none = 0, no_count;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const bool is_kept = own + j < size && selection.before + own + j < most;
      const unsigned key = static_cast<unsigned>(memory.sorted[own + j] >> 32);
      masses[j] = has_p && is_kept ? rule.mass(-__uint_as_float(key)) : 0;
      mass += masses[j];
    }
    sums_before(memory, none, mass, no_count, all_mass);
    if (!needs_mass) {
      mass_limit = has_p ? Selection<ScoreRule, kBlocks>::share_of(all_mass, part) : ~0ull;
    }
    mass += selection.mass_before;
#pragma unroll 1
    for (int j = 0; j < kEach; ++j) {
      if (own + j < size && selection.before + own + j < most && mass < mass_limit) {
        const unsigned key = static_cast<unsigned>(memory.sorted[own + j] >> 32);
        const int index = static_cast<int>(memory.sorted[own + j]);
        const float value = -__uint_as_float(key) + Noise::exact(noise.bits(index));
        winner = JoinWinners::merge(winner, {value, key, index, 0});
      }
      if (has_p && own + j < size) {
        mass += rule.mass(-__uint_as_float(static_cast<unsigned>(memory.sorted[own + j] >> 32)));
      }
    }
  }
  winner = join_lanes<JoinWinners, kSelectThreads>(winner, kSelectThreads);
  if (threadIdx.x == 0) tokens[row] = winner.index;
}

// values, indices (rows, k): the k largest of each row in descending order, k <= kCandidates / 2.
template <typename T, int kBlocks>
__global__ void __launch_bounds__(kSelectThreads, 2)
    top_k(const T* x, T* values, long long* indices, int length, int chunk, int k,
          long long row_stride, long long column_stride) {
  extern __shared__ uint4 dynamic[];
  SelectMemory& memory = *reinterpret_cast<SelectMemory*>(dynamic);
  pdl_launch_dependents();
  const long long row = blockIdx.x / kBlocks;
  x += row * row_stride;
  Piece piece = piece_of<kBlocks>(dynamic, length, chunk);
  pdl_wait();
  const Extent loaded = load_piece(piece, x, column_stride);
  const Extent extent = join_extents<kBlocks>(memory, loaded, 0);
  const ValueRule rule = {extent.best, kSelectBins / (extent.best - extent.least)};
  Selection<ValueRule, kBlocks> selection(memory, piece, rule);
  if (k <= extent.threads) selection.restart(rule.key(extent.least));
  Mass wanted = k;
  selection.template select<false>(wanted, 0, false);
  if (selection.before + selection.count <= kCandidates) {
    selection.first = 0;
    selection.list();
  } else {
    selection.template select<false>(wanted, 0, true);
    if (threadIdx.x == 0) memory.in_list = 0;
    selection.visit_ties(k - selection.before, [&](int i, bool is_within) {
      const unsigned key = rule.key(piece.held[i]);
      if (is_within || key < selection.first) selection.append(key, piece.begin + i);
    });
  }
  cluster_barrier<kBlocks>();
  if (rank_in_cluster<kBlocks>() != 0) {
    cluster_barrier<kBlocks>();  // the first block reads the lists
    return;
  }
  const int size = selection.collect();
  cluster_barrier<kBlocks>();
  selection.sort(size);
  for (int i = threadIdx.x; i < k; i += kSelectThreads) {
    const int index = static_cast<int>(memory.sorted[i]);
    values[row * k + i] = x[index * column_stride];
    indices[row * k + i] = index;
  }
}

}  // namespace fusedops
