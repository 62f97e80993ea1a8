// 8-bit values with float32 scales: a scale a row, a group of 128 elements, or one for all.
//
//   quantize_rows     with given scales, or a scale a row or a group: one pass, rows in registers.
//   largest_parts     the largest magnitude of each block's elements.
//   quantize_tensor   joins these into one scale and quantizes with it: no host, no counter.

#include "pack.cuh"
#include "pdl.cuh"
#include "row.cuh"
#include "row_store.cuh"

namespace fusedops {

// Rows of `packs` packs at any places, elements `inner` apart; `parts` blocks a row.
template <class Layout, class Sink, typename T, int kWidth, bool kIsFlat>
__global__ void __launch_bounds__(Layout::kThreads, Layout::resident(Layout::kPacks > 4 ? 64 : 40))
    quantize_rows(const T* x, const float* given, void* out, float* scales, long long rows,
                  int packs, unsigned parts, long long given_stride, long long scale_pitch,
                  long long inner, long long x1, long long x2, long long x3, long long x_stride0,
                  long long x_stride1, long long x_stride2, long long x_stride3) {
  constexpr int kPacks = Layout::kPacks;
  __shared__ JoinScratch scratch;
  pdl_enter<Layout>();
  if constexpr (Layout::kCluster > 1) cluster_arrive();
  const Layout at = Layout::of_thread(parts);
  const bool is_row = at.template is_row<Sink::kPads>(rows);
  const Dims dims = {{1, x1, x2, x3}, {x_stride0, x_stride1, x_stride2, x_stride3}};
  const T* from = x + row_offset<kIsFlat>(dims, is_row ? at.row : 0, rows);
  const QuantizedRows quantized_rows = {static_cast<unsigned char*>(out), given, scales,
                                        given_stride, scale_pitch};
  pdl_wait_for_rows<Layout>();
  const float scale = read_scale<Sink>(quantized_rows, at.row, is_row);
  Pack<T, kWidth> values[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    values[p] = is_row && at.has(p, packs) ? load_pack<T, kWidth>(from, at.pack(p), inner)
                                           : filled_pack<T, kWidth>(0.0f);
  }
  if constexpr (Layout::kCluster > 1) cluster_wait();
  store_quantized<Layout, Sink>(at, quantized_rows, values, is_row, packs, scale, scratch);
}

constexpr int kThreads = 256;
constexpr int kInFlight = 4;  // loads of a thread before the first is used
using WholeBlock = RowLayout<kThreads, kThreads, 1, 1, 1, true>;

// Calls use(pack, number) for this thread's packs out of `count`, which lie at any places.
template <typename T, int kWidth, bool kIsFlat, class Use>
__device__ __forceinline__ void each_pack(const T* x, long long count, const Dims& dims, Use use) {
  const long long step = static_cast<long long>(gridDim.x) * kThreads;
  long long number = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x;
  for (; number < count; number += kInFlight * step) {
    Pack<T, kWidth> read[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const long long at = number + i * step;
      if (at < count) {
        const T* from = x + row_offset<kIsFlat>(dims, at, count);
        read[i] = load_pack<T, kWidth>(from, 0, 1);
      }
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (number + i * step < count) use(read[i], number + i * step);
    }
  }
}

template <typename T, int kWidth, bool kIsFlat>
__global__ void __launch_bounds__(kThreads)
    largest_parts(const T* x, unsigned* parts, long long count, long long x1, long long x2,
                  long long x3, long long x_stride0, long long x_stride1, long long x_stride2,
                  long long x_stride3) {
  __shared__ JoinScratch scratch;
  pdl_launch_dependents();
  const Dims dims = {{1, x1, x2, x3}, {x_stride0, x_stride1, x_stride2, x_stride3}};
  unsigned largest = 0;
  pdl_wait();
  each_pack<T, kWidth, kIsFlat>(x, count, dims, [&](const Pack<T, kWidth>& pack, long long) {
    largest = max(largest, magnitude_bits(pack));
  });
  largest = join_row<WholeBlock, Largest>(largest, scratch);
  if (threadIdx.x == 0) parts[blockIdx.x] = largest;
}

template <class Format, typename T, int kWidth, bool kIsFlat>
__global__ void __launch_bounds__(kThreads)
    quantize_tensor(const T* x, const unsigned* parts, unsigned char* out, float* scale_out,
                    long long count, int part_count, long long x1, long long x2, long long x3,
                    long long x_stride0, long long x_stride1, long long x_stride2,
                    long long x_stride3) {
  __shared__ JoinScratch scratch;
  pdl_launch_dependents();
  const Dims dims = {{1, x1, x2, x3}, {x_stride0, x_stride1, x_stride2, x_stride3}};
  unsigned largest = 0;
  pdl_wait();
#pragma unroll 1
  for (int i = threadIdx.x; i < part_count; i += kThreads) largest = max(largest, parts[i]);
  const float scale = dynamic_scale<Format>(join_row<WholeBlock, Largest>(largest, scratch));
  const float inverse = dynamic_inverse(scale);
  each_pack<T, kWidth, kIsFlat>(x, count, dims, [&](const Pack<T, kWidth>& pack, long long number) {
    store_codes<Format>(out, number, pack, inverse);
  });
  if (blockIdx.x == 0 && threadIdx.x == 0) *scale_out = scale;
}

}  // namespace fusedops
