// act(gate) * up of rows (gate | up), both results rounded to T as a model in eager mode rounds
// them, and stored as they are or with 8 bits.

#include "activations.cuh"
#include "pack.cuh"
#include "pdl.cuh"
#include "row.cuh"
#include "row_store.cuh"

namespace fusedops {

// Rows of 2 * packs packs at any places, elements `inner` apart; `parts` blocks a row.
template <class Layout, class Act, class Sink, typename T, int kWidth, bool kIsFlat>
__global__ void __launch_bounds__(Layout::kThreads, Layout::resident(Layout::kPacks > 2 ? 64 : 40))
    act_and_mul(const T* x, const float* given, void* out, float* scales, long long rows, int packs,
                unsigned parts, long long given_stride, long long scale_pitch, long long inner,
                long long x1, long long x2, long long x3, long long x_stride0, long long x_stride1,
                long long x_stride2, long long x_stride3) {
  constexpr int kPacks = Layout::kPacks;
  constexpr bool kIsPrecise = sizeof(T) == 4;
  __shared__ JoinScratch scratch;
  pdl_enter<Layout>();
  if constexpr (Layout::kCluster > 1) cluster_arrive();
  const Layout at = Layout::of_thread(parts);
  const bool is_row = at.template is_row<Sink::kPads>(rows);
  const long long row = is_row ? at.row : 0;
  const Dims dims = {{1, x1, x2, x3}, {x_stride0, x_stride1, x_stride2, x_stride3}};
  const T* gate_row = x + row_offset<kIsFlat>(dims, row, rows);
  const T* up_row = gate_row + packs * inner * kWidth;
  const QuantizedRows quantized_rows = {static_cast<unsigned char*>(out), given, scales,
                                        given_stride, scale_pitch};
  pdl_wait_for_rows<Layout>();
  const float scale = read_scale<Sink>(quantized_rows, at.row, is_row);

  Pack<T, kWidth> values[kPacks], up[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int pack = at.pack(p);
    const bool is_in = is_row && at.has(p, packs);
    values[p] = is_in ? load_pack<T, kWidth>(gate_row, pack, inner) : filled_pack<T, kWidth>(0.0f);
    up[p] = is_in ? load_pack<T, kWidth>(up_row, pack, inner) : filled_pack<T, kWidth>(0.0f);
  }
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    float gate[kWidth];
    widen(values[p], gate);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) gate[j] = Act::template of<kIsPrecise>(gate[j]);
    values[p] = rounded_product(rounded<T, kWidth>(gate), up[p]);
  }
  if constexpr (Layout::kCluster > 1) cluster_wait();
  if constexpr (Sink::kIsPlain) {
    T* results = static_cast<T*>(out) + row * packs * kWidth;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (is_row && at.has(p, packs)) store_pack(results, at.pack(p), 1, values[p]);
    }
  } else {
    store_quantized<Layout, Sink>(at, quantized_rows, values, is_row, packs, scale, scratch);
  }
}

}  // namespace fusedops
