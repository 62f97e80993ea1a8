// Rows of a table by id; an id outside the table gives zeros and reads nothing.

#include "dims.cuh"
#include "pdl.cuh"

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

}  // namespace fusedops
