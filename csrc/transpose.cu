// out[b][c][r] = x[b][r][c] for a contiguous out and any strides of x. Elements are moved as
// unsigned integers of their size, so that every bit stays.

#include "dims.cuh"
#include "memory.cuh"
#include "pdl.cuh"
#include "realigned_tile.cuh"
#include "register_transpose.cuh"
#include "shifted_tile.cuh"
#include "tiles.cuh"
#include "vec.cuh"

namespace fusedops {

// Blocks of one SM that registers are limited for; 0 leaves them to the compiler. With 8 KiB (8
// bytes) to 64 KiB (1 byte) a block, at least 64 KiB of an SM's loads are in flight, four times
// what the memory's latency asks for. Only bytes take too many registers for three blocks, and from
// sm_100 on the compiler would spill under that limit.
#if __CUDA_ARCH__ >= 1000
constexpr int kByteBlocksPerSm = 0;
#else
constexpr int kByteBlocksPerSm = 3;
#endif
template <typename T>
constexpr int kBlocksPerSm = sizeof(T) == 1 ? kByteBlocksPerSm : 0;

// Where a tile holds vector `q` of row `c` of out, counted in vectors. The permutation lets eight
// threads that write one q in rows c, c + 1, ... or in rows c, c + width, ..., and eight threads
// that read one row, use all 32 banks.
template <typename T>
__device__ __forceinline__ int place(int c, int q) {
  return c * kVecsPerRow + (q ^ ((c ^ (c / kVecWidth<T>)) & 7));
}

// Sixteen bytes at a time: each thread reads a square block of elements and turns it in registers.
template <typename T>
__device__ __forceinline__ void load_blocks(const T* x, uint4* tile, int rows, int columns,
                                            long long row_stride) {
  constexpr int kWidth = kVecWidth<T>;
  const int r = threadIdx.x / kVecsPerRow * kWidth;
  const int c = threadIdx.x % kVecsPerRow * kWidth;
  if (r >= rows || c >= columns) return;  // columns is a multiple of the width
  const T* first = x + r * row_stride + c;
  uint4 block[kWidth];
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    // A row past the end repeats the last one; it is not written out.
    block[k] = load_cached(first + min(k, rows - 1 - r) * row_stride);
  }
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    tile[place<T>(c + k, r / kWidth)] = block_column<sizeof(T)>(block, k);
  }
}

// One element at a time, neighbouring threads on neighbouring columns: for any strides and address.
template <typename T>
__device__ __forceinline__ void load_elements(const T* x, uint4* tile, int rows, int columns,
                                              long long row_stride, long long column_stride) {
  constexpr int kWidth = kVecWidth<T>;
  constexpr int kItems = kTile<T> * kVecsPerRow / kThreads;
  constexpr int kBatch = kItems < 4 ? kItems : 4;  // vectors gathered before the first is stored
#pragma unroll 1
  for (int item = 0; item < kItems; item += kBatch) {
    Vec<T> gathered[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int index = (item + b) * kThreads + threadIdx.x;
      const int c = index % kTile<T>;
      const int r = index / kTile<T> * kWidth;
      const T* first = x + r * row_stride + c * column_stride;
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        gathered[b].data[k] = c < columns && r + k < rows ? first[k * row_stride] : T(0);
      }
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int index = (item + b) * kThreads + threadIdx.x;
      reinterpret_cast<Vec<T>*>(tile)[place<T>(index % kTile<T>, index / kTile<T>)] = gathered[b];
    }
  }
}

template <typename T>
__device__ __forceinline__ void store_vectors(T* out, const uint4* tile, int rows, int columns,
                                              long long out_stride) {
  constexpr int kWidth = kVecWidth<T>;
#pragma unroll
  for (int step = 0; step < kWidth; ++step) {
    const int index = step * kThreads + threadIdx.x;
    const int c = index / kVecsPerRow;
    const int q = index % kVecsPerRow;
    if (c < columns && q * kWidth < rows) {  // rows is a multiple of the width
      reinterpret_cast<uint4*>(out + c * out_stride)[q] = tile[place<T>(c, q)];
    }
  }
}

template <typename T>
__device__ __forceinline__ void store_elements(T* out, const uint4* tile, int rows, int columns,
                                               long long out_stride) {
  constexpr int kWidth = kVecWidth<T>;
  const T* elements = reinterpret_cast<const T*>(tile);
#pragma unroll 8
  for (int index = threadIdx.x; index < kTile<T> * kTile<T>; index += kThreads) {
    const int r = index % kTile<T>;
    const int c = index / kTile<T>;
    if (r < rows && c < columns) {
      out[c * out_stride + r] = elements[place<T>(c, r / kWidth) * kWidth + r % kWidth];
    }
  }
}

// One tile a block. Dynamic shared memory: one tile.
// kVecLoad: rows of x are contiguous and start at multiples of 16 bytes, as does their end.
// kVecStore: the same of rows of out.
template <typename T, bool kVecLoad, bool kVecStore>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<T>)
    transpose_tiles(const T* x, T* out, long long rows, long long columns, long long row_stride,
                    long long column_stride, unsigned row_tiles, unsigned column_tiles,
                    unsigned group, long long size1, long long size2, long long size3,
                    long long stride0, long long stride1, long long stride2, long long stride3) {
  extern __shared__ uint4 tile[];
  pdl_launch_dependents();
  const Dims batch = {{1, size1, size2, size3}, {stride0, stride1, stride2, stride3}};
  const auto [matrix, tile_row, tile_column] =
      tile_place(blockIdx.x, row_tiles, column_tiles, group);
  const long long r = static_cast<long long>(tile_row) * kTile<T>;
  const long long c = static_cast<long long>(tile_column) * kTile<T>;
  const int tile_rows = static_cast<int>(min(rows - r, static_cast<long long>(kTile<T>)));
  const int tile_columns = static_cast<int>(min(columns - c, static_cast<long long>(kTile<T>)));
  const T* from = x + batch.offset(matrix) + r * row_stride + c * column_stride;
  T* to = out + (matrix * columns + c) * rows + r;
  pdl_wait();
  if constexpr (kVecLoad) {
    load_blocks(from, tile, tile_rows, tile_columns, row_stride);
  } else {
    load_elements(from, tile, tile_rows, tile_columns, row_stride, column_stride);
  }
  __syncthreads();
  if constexpr (kVecStore) {
    store_vectors(to, tile, tile_rows, tile_columns, rows);
  } else {
    store_elements(to, tile, tile_rows, tile_columns, rows);
  }
}

// One tile a block, for rows of x and of out that start anywhere. Elements of a row of x lie side
// by side. Dynamic shared memory: ShiftedTile<T>::kBytes.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    transpose_shifted(const T* x, T* out, long long rows, long long columns, long long row_stride,
                      unsigned row_tiles, unsigned column_tiles, unsigned group, long long size1,
                      long long size2, long long size3, long long stride0, long long stride1,
                      long long stride2, long long stride3) {
  extern __shared__ uint4 tile[];
  using Tile = ShiftedTile<T>;
  pdl_launch_dependents();
  const Dims batch = {{1, size1, size2, size3}, {stride0, stride1, stride2, stride3}};
  const auto [matrix, tile_row, tile_column] =
      tile_place(blockIdx.x, row_tiles, column_tiles, group);
  const long long r = static_cast<long long>(tile_row) * Tile::kRows;
  const long long c = static_cast<long long>(tile_column) * Tile::kColumns;
  const Tile at(x + batch.offset(matrix) + r * row_stride + c,
                out + (matrix * columns + c) * rows + r, row_stride, rows, tile);
  pdl_wait();
  const bool is_inner =
      r > 0 && r + Tile::kHeld < rows && c > 0 && c + Tile::kColumns + Tile::kWidth <= columns;
  if (is_inner) {
    at.load_inner();
    __syncthreads();
    at.store_inner();
  } else {
    at.load_edge(rows - r, columns - c, c == 0);
    __syncthreads();
    at.store_edge(rows - r, columns - c, r == 0);
  }
}

// The same for small elements: their rows are shifted into place on the way. Dynamic shared memory:
// RealignedTile<T>::kBytes.
template <typename T>
__global__ void __launch_bounds__(RealignedTile<T>::kThreads, RealignedTile<T>::kBlocksPerSm)
    transpose_realigned(const T* x, T* out, long long rows, long long columns, long long row_stride,
                        unsigned row_tiles, unsigned column_tiles, unsigned group, long long size1,
                        long long size2, long long size3, long long stride0, long long stride1,
                        long long stride2, long long stride3) {
  extern __shared__ uint4 tile[];
  using Tile = RealignedTile<T>;
  pdl_launch_dependents();
  const Dims batch = {{1, size1, size2, size3}, {stride0, stride1, stride2, stride3}};
  const auto [matrix, tile_row, tile_column] =
      tile_place(blockIdx.x, row_tiles, column_tiles, group);
  const long long r = static_cast<long long>(tile_row) * Tile::kRows;
  const long long c = static_cast<long long>(tile_column) * Tile::kColumns;
  const T* first = x + batch.offset(matrix);
  const Tile at = {first + r * row_stride + c,
                   out + (matrix * columns + c) * rows + r,
                   row_stride,
                   rows,
                   first,
                   first + (rows - 1) * row_stride + columns,
                   tile};
  pdl_wait();
  const int tile_rows = static_cast<int>(min(rows - r, static_cast<long long>(Tile::kHeld)));
  const int tile_columns =
      static_cast<int>(min(columns - c, static_cast<long long>(Tile::kColumns)));
  if (at.reads_inside(rows - r, columns - c)) {
    at.template load<true>(tile_rows, tile_columns);
  } else {
    at.template load<false>(tile_rows, tile_columns);
  }
  __syncthreads();
  if (r > 0 && tile_rows == Tile::kHeld && tile_columns == Tile::kColumns) {
    at.template store<true>(tile_rows, tile_columns, false);
  } else {
    at.template store<false>(tile_rows, tile_columns, r == 0);
  }
}

// Matrices with a side too short for tiles, and copies: threads lie along the long side and walk
// the short one, so that one of the two tensors is read or written whole and the caches hold the
// other.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    transpose_gather(const T* x, T* out, long long matrices, long long long_size,
                     long long short_size, long long x_long, long long x_short, long long out_long,
                     long long out_short, long long size1, long long size2, long long size3,
                     long long stride0, long long stride1, long long stride2, long long stride3) {
  pdl_launch_dependents();
  const Dims batch = {{1, size1, size2, size3}, {stride0, stride1, stride2, stride3}};
  const unsigned long long length = long_size;
  const unsigned long long work = matrices * length;
  const unsigned long long threads = static_cast<unsigned long long>(gridDim.x) * kThreads;
  pdl_wait();
  for (unsigned long long i = static_cast<unsigned long long>(blockIdx.x) * kThreads + threadIdx.x;
       i < work; i += threads) {
    const unsigned long long matrix = i / length;
    const long long place = i - matrix * length;
    const T* from = x + batch.offset(matrix) + place * x_long;
    T* to = out + matrix * length * short_size + place * out_long;
#pragma unroll 4
    for (long long s = 0; s < short_size; ++s) to[s * out_short] = from[s * x_short];
  }
}

}  // namespace fusedops
