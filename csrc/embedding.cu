// Rows of a table by id; an id outside the table gives zeros and reads nothing.
//
//   embedding        the rows.
//   embedding_sumsq  the rows and the sum of squares of each, for the norm that comes next.

#include "dims.cuh"
#include "pack.cuh"
#include "pdl.cuh"
#include "row.cuh"

namespace fusedops {

constexpr int kThreads = 256;

// `columns` words of Word a row, a vector or an element each. blockIdx.x is a token; the threads of
// a row of blocks take kUnroll words each.
template <typename Word, typename Index, int kUnroll>
__global__ void __launch_bounds__(kThreads)
    embedding(const Index* ids, const Word* weight, Word* out, long long rows, int columns,
              long long row_stride, long long column_stride, long long id1, long long id2,
              long long id3, long long id_stride0, long long id_stride1, long long id_stride2,
              long long id_stride3) {
  pdl_launch_dependents();
  const Dims places = {{1, id1, id2, id3}, {id_stride0, id_stride1, id_stride2, id_stride3}};
  const unsigned long long token = blockIdx.x;
  const int first = blockIdx.y * kThreads * kUnroll + threadIdx.x;
  const long long place = places.offset(token);
  pdl_wait();
  const long long id = ids[place];
  const bool is_inside = id >= 0 && id < rows;
  const Word* from = weight + id * row_stride;
  Word* to = out + token * columns;
  Word held[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int column = first + u * kThreads;
    held[u] = Word{};
    if (is_inside && column < columns) held[u] = from[column * column_stride];
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int column = first + u * kThreads;
    if (column < columns) to[column] = held[u];
  }
}

// Rows of `packs` packs, kept in registers between the store and the sum, which is float in an
// order that depends on the layout alone. A row of the grid is a token.
template <class Layout, typename T, typename Index, int kWidth>
__global__ void __launch_bounds__(Layout::kThreads, Layout::resident(56))
    embedding_sumsq(const Index* ids, const T* weight, T* out, float* sumsq, long long tokens,
                    long long rows, int packs, long long row_stride, long long column_stride,
                    long long id1, long long id2, long long id3, long long id_stride0,
                    long long id_stride1, long long id_stride2, long long id_stride3) {
  constexpr int kPacks = Layout::kPacks;
  __shared__ JoinScratch scratch;
  pdl_enter<Layout>();
  if constexpr (Layout::kCluster > 1) cluster_arrive();
  const Layout at = Layout::of_thread(Layout::kCluster);
  const bool is_token = at.template is_row<false>(tokens);
  const long long token = is_token ? at.row : 0;
  const Dims places = {{1, id1, id2, id3}, {id_stride0, id_stride1, id_stride2, id_stride3}};
  const long long place = row_offset<false>(places, token, tokens);
  T* to = out + token * packs * kWidth;
  pdl_wait_for_rows<Layout>();
  const long long id = ids[place];
  const bool is_inside = is_token && id >= 0 && id < rows;
  const T* from = weight + (is_inside ? id : 0) * row_stride;
  Pack<T, kWidth> values[kPacks];
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    values[p] = is_inside && at.has(p, packs)
                    ? load_pack<T, kWidth>(from, at.pack(p), column_stride)
                    : filled_pack<T, kWidth>(0.0f);
  }
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    if (is_token && at.has(p, packs)) store_pack(to, at.pack(p), 1, values[p]);
  }
  float squares = 0.0f;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    // Chains of additions are no longer than a pack and the number of packs.
    float wide[kWidth];
    widen(values[p], wide);
    float part = 0.0f;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) part += wide[j] * wide[j];
    squares += part;
  }
  if constexpr (Layout::kCluster > 1) cluster_wait();
  squares = join_row<Layout, Add>(squares, scratch);
  if (is_token && at.is_first()) sumsq[token] = squares;
}

}  // namespace fusedops
