// RMSNorm, residual add + RMSNorm, and LayerNorm over rows that threads keep in registers: each
// element is read once and written once. Statistics are float, in an order that depends on the
// layout alone. The normalised row is rounded to T as the plain operation rounds it, and quantized
// from there where a `Sink` with scales asks for it.

#include "pack.cuh"
#include "pdl.cuh"
#include "row.cuh"
#include "row_store.cuh"

namespace fusedops {

// Where RMSNorm rounds beside the end.
enum Order {
  kRoundTwice = 0,  // the normalised value and the product with a weight of the same type
  kRoundFirst = 1,  // the normalised value; the product is float until the end
  kRoundOnce = 2,   // nowhere
};

template <bool kAdds_, int kOrder_>
struct Rms {
  static constexpr bool kCenters = false;
  static constexpr bool kAdds = kAdds_;
  static constexpr int kOrder = kOrder_;
};

struct Layer {
  static constexpr bool kCenters = true;
  static constexpr bool kAdds = false;
  static constexpr int kOrder = kRoundOnce;
};

// What the elements are multiplied and shifted by; null stands for 1 and 0.
template <typename W, int kWidth>
__device__ __forceinline__ Pack<W, kWidth> load_parameter(const W* parameter, int pack, bool is_in,
                                                          float otherwise) {
  if (parameter == nullptr || !is_in) return filled_pack<W, kWidth>(otherwise);
  return reinterpret_cast<const Pack<W, kWidth>*>(parameter)[pack];
}

// Bytes of the weight that a thread reads while it waits for x; more would take registers that
// other rows in flight need.
constexpr int kEarlyBytes = 64;

// What a thread may take so that nothing spills. At 56 registers 72 KB of rows are in flight on an
// SM, four times the memory's latency times its bandwidth.
template <class Norm, class Sink>
constexpr int kRegisters = Norm::kAdds && !Sink::kIsPlain      ? 72
                           : Norm::kCenters || !Sink::kIsPlain ? 64
                                                               : 56;

// x, residual: rows at any places, elements `inner` apart. share: one over the elements of a row.
// in_place: the results replace x and the residual; otherwise they are contiguous.
template <class Layout, class Norm, class Sink, typename T, typename W, typename B, int kWidth,
          bool kIsFlat>
__global__ void __launch_bounds__(Layout::kThreads, Layout::resident(kRegisters<Norm, Sink>))
    norm(const T* x, const T* residual, const W* weight, const B* bias, const float* given,
         void* out, T* total, float* scales, long long rows, int packs, unsigned share_bits,
         unsigned eps_bits, unsigned offset_bits, int in_place, long long given_stride,
         long long scale_pitch, long long x_inner, long long residual_inner, long long x1,
         long long x2, long long x3, long long x_stride0, long long x_stride1, long long x_stride2,
         long long x_stride3, long long residual1, long long residual2, long long residual3,
         long long residual_stride0, long long residual_stride1, long long residual_stride2,
         long long residual_stride3) {
  constexpr int kPacks = Layout::kPacks;
  constexpr bool kIsEarly = kPacks * kWidth * sizeof(W) <= kEarlyBytes;
  __shared__ JoinScratch scratch[3];
  pdl_enter<Layout>();
  if constexpr (Layout::kCluster > 1) cluster_arrive();
  const Layout at = Layout::of_thread(Layout::kCluster);
  const bool is_row = at.template is_row<Sink::kPads>(rows);
  const long long row = is_row ? at.row : 0;
  const Dims x_dims = {{1, x1, x2, x3}, {x_stride0, x_stride1, x_stride2, x_stride3}};
  const long long x_place = row_offset<kIsFlat>(x_dims, row, rows);
  const long long dense_place = row * packs * kWidth;
  const QuantizedRows quantized_rows = {static_cast<unsigned char*>(out), given, scales,
                                        given_stride, scale_pitch};
  pdl_wait_for_rows<Layout>();
  const float scale = read_scale<Sink>(quantized_rows, at.row, is_row);

  Pack<T, kWidth> values[kPacks];
  if constexpr (Norm::kAdds) {
    const Dims residual_dims = {
        {1, residual1, residual2, residual3},
        {residual_stride0, residual_stride1, residual_stride2, residual_stride3}};
    const long long residual_place = row_offset<kIsFlat>(residual_dims, row, rows);
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int pack = at.pack(p);
      values[p] = filled_pack<T, kWidth>(0.0f);
      if (is_row && at.has(p, packs)) {
        const auto own = load_pack<T, kWidth>(x + x_place, pack, x_inner);
        const auto other = load_pack<T, kWidth>(residual + residual_place, pack, residual_inner);
        values[p] = rounded_sum(own, other);
      }
    }
    T* sums = total + (in_place ? residual_place : dense_place);
    const long long sums_inner = in_place ? residual_inner : 1;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (is_row && at.has(p, packs)) store_pack(sums, at.pack(p), sums_inner, values[p]);
    }
  } else {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      values[p] = is_row && at.has(p, packs)
                      ? load_pack<T, kWidth>(x + x_place, at.pack(p), x_inner)
                      : filled_pack<T, kWidth>(0.0f);
    }
  }
  Pack<W, kWidth> early[kIsEarly ? kPacks : 1];
  if constexpr (kIsEarly) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      early[p] = load_parameter<W, kWidth>(weight, at.pack(p), at.has(p, packs), 1.0f);
    }
  }
  if constexpr (Layout::kCluster > 1) cluster_wait();

  const float share = __uint_as_float(share_bits);
  const float eps = __uint_as_float(eps_bits);
  const float weight_offset = __uint_as_float(offset_bits);
  float mean = 0.0f;
  if constexpr (Norm::kCenters) {
    float sum = 0.0f;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      float wide[kWidth];
      widen(values[p], wide);
      float part = 0.0f;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) part += wide[j];
      sum += part;
    }
    mean = join_row<Layout, Add>(sum, scratch[0]) * share;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) forget_widened(values[p]);
  }
  float squares = 0.0f;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    // Chains of additions are no longer than a pack and the number of packs.
    float wide[kWidth];
    widen(values[p], wide);
    float part = 0.0f;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const float distance = Norm::kCenters ? wide[j] - mean : wide[j];
      part += distance * distance;
    }
    // Where nothing was read, the distance is that of a zero from the mean.
    if constexpr (Norm::kCenters) part = at.has(p, packs) ? part : 0.0f;
    squares += part;
  }
  squares = join_row<Layout, Add>(squares, scratch[1]);
  const float inverse_norm = rsqrtf(squares * share + eps);

#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int pack = at.pack(p);
    forget_widened(values[p]);
    Pack<W, kWidth> factors;
    if constexpr (kIsEarly) {
      factors = early[p];
    } else {
      factors = load_parameter<W, kWidth>(weight, pack, at.has(p, packs), 1.0f);
    }
    float wide[kWidth];
    widen(values[p], wide);
    if constexpr (Norm::kCenters) {
      float scaled[kWidth], shifted[kWidth];
      widen(factors, scaled);
      widen(load_parameter<B, kWidth>(bias, pack, at.has(p, packs), 0.0f), shifted);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        wide[j] = (wide[j] - mean) * inverse_norm * scaled[j] + shifted[j];
      }
      values[p] = rounded<T, kWidth>(wide);
    } else {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) wide[j] *= inverse_norm;
      if constexpr (Norm::kOrder == kRoundTwice) {
        values[p] = rounded_product(rounded<T, kWidth>(wide), factors);
      } else {
        if constexpr (Norm::kOrder == kRoundFirst) widen(rounded<T, kWidth>(wide), wide);
        float scaled[kWidth];
        widen(factors, scaled);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) wide[j] *= scaled[j] + weight_offset;
        values[p] = rounded<T, kWidth>(wide);
      }
    }
  }
  if constexpr (Sink::kIsPlain) {
    T* results = static_cast<T*>(out) + (in_place ? x_place : dense_place);
    const long long results_inner = in_place ? x_inner : 1;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (is_row && at.has(p, packs)) store_pack(results, at.pack(p), results_inner, values[p]);
    }
  } else {
    store_quantized<Layout, Sink>(at, quantized_rows, values, is_row, packs, scale, scratch[2]);
  }
}

}  // namespace fusedops
