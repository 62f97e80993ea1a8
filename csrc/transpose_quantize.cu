// out[b][c][r] = x[b][r][c], converted: to another float, or to 8 bits with float32 scales. Rows of
// the result are columns of x.
//
//   turn_tiles   128 rows of x a block. A group of the result's row is one column of such a tile,
//                so that scales of groups cost no second look at x.
//   cast_packs   where rows of the result lie in x as they are.
//
// A scale for each row of the result follows from the largest magnitudes of columns, which
// reduce.cu has found.

#include "dims.cuh"
#include "pdl.cuh"
#include "row_store.cuh"
#include "turned_tile.cuh"

namespace fusedops {

static_assert(kTurnedRows == kGroup, "a tile's rows are a group");

// A sink beside those of row_store.cuh: another float, rounded.
template <typename Out>
struct Rounded {
  static constexpr bool kIsPlain = true;
  static constexpr int kElementBytes = sizeof(Out);

  static __device__ __forceinline__ void convert(const float (&values)[kHeldRows], float,
                                                 unsigned (&words)[kHeldRows * sizeof(Out) / 4]) {
    const auto pack = rounded<Out, kHeldRows>(values);
#pragma unroll
    for (int i = 0; i < kHeldRows * kElementBytes / 4; ++i) {
      if constexpr (kElementBytes == 2) {
        words[i] = pack.words[i];
      } else {
        words[i] = __float_as_uint(pack.data[i]);
      }
    }
  }
};

// How `turn_tiles` stores what a sink of row_store.cuh says.
template <class Sink>
struct Coded : Sink {
  using Format = typename Sink::Format;
  static constexpr int kElementBytes = 1;

  static __device__ __forceinline__ void convert(const float (&values)[kHeldRows], float inverse,
                                                 unsigned (&words)[kHeldRows / 4]) {
#pragma unroll
    for (int i = 0; i < kHeldRows / 4; ++i) {
      const float* four = values + 4 * i;
      words[i] = Format::pair(four[0] * inverse, four[1] * inverse) |
                 Format::pair(four[2] * inverse, four[3] * inverse) << 16;
    }
  }
};

// Largest magnitudes of the columns of a tile, a vector for each warp and vector of a row.
struct Largests {
  uint4 of_warp[kThreads / 32][kVecsPerRow];

  template <typename T, int kWidth>
  __device__ __forceinline__ void put(const Pack<T, kWidth> (&held)[kHeldRows]) {
    static_assert(kVecsPerRow == 16, "a warp has two threads for each vector of a row");
    Pack<T, kWidth> most = larger(held[0], held[1]);
#pragma unroll
    for (int k = 2; k < kHeldRows; ++k) most = larger(most, held[k]);
    uint4 bits = same_bits<uint4>(most);
    const uint4 others = {__shfl_xor_sync(0xffffffffu, bits.x, kVecsPerRow),
                          __shfl_xor_sync(0xffffffffu, bits.y, kVecsPerRow),
                          __shfl_xor_sync(0xffffffffu, bits.z, kVecsPerRow),
                          __shfl_xor_sync(0xffffffffu, bits.w, kVecsPerRow)};
    bits = same_bits<uint4>(larger(most, same_bits<Pack<T, kWidth>>(others)));
    const int lane = threadIdx.x % 32;
    if (lane < kVecsPerRow) of_warp[threadIdx.x / 32][lane] = bits;
  }

  // The bits of column c's, as a float.
  template <typename T>
  __device__ __forceinline__ unsigned of_column(int c) const {
    unsigned largest = 0;
#pragma unroll
    for (int warp = 0; warp < kThreads / 32; ++warp) {
      const T* of_columns = reinterpret_cast<const T*>(of_warp[warp]);
      largest = max(largest, __float_as_uint(to_float(of_columns[c])));
    }
    return largest;
  }
};

// Scales, as `Sink` has them. With kIsGiven `known` are float32 scales, known_stride apart from row
// to row of the result; for a scale a row they are the largest magnitudes of rows, of type T. Row
// `row` of group `group` has its scale at scales[group * pitch + row], and rows behind the last one
// have ones up to the pitch.
struct Scales {
  const void* known;
  float* scales;
  long long known_stride;
  long long pitch;
};

// 1 / scale of row `row` of the result, which is column `c` of a tile with `columns`.
template <class Sink, typename T>
__device__ __forceinline__ float column_inverse(const Scales& at, const Largests& largests,
                                                long long row, unsigned group, int c, int columns,
                                                long long all_rows) {
  using Format = typename Sink::Format;
  if constexpr (Sink::kIsGiven) {
    if (c >= columns) return 0.0f;
    return __frcp_rn(static_cast<const float*>(at.known)[row * at.known_stride]);
  } else if constexpr (Sink::kIsGroup) {
    const bool is_row = c < columns;
    const float scale = dynamic_scale<Format>(is_row ? largests.of_column<T>(c) : 0);
    // Behind the last row the tile has no columns, whose scale is one.
    if (is_row || (row >= all_rows && row < at.pitch)) at.scales[group * at.pitch + row] = scale;
    return dynamic_inverse(scale);
  } else {
    if (c >= columns) return 0.0f;
    const float largest = to_float(static_cast<const T*>(at.known)[row]);
    const float scale = dynamic_scale<Format>(__float_as_uint(largest));
    if (group == 0) at.scales[row] = scale;
    return dynamic_inverse(scale);
  }
}

// Blocks of one SM that registers are limited for. Four have 128 KiB of loads in flight; tiles of
// 64 KiB leave room for three. Loads of single elements take more registers: from sm_100 on the
// compiler would spill under a limit.
#if __CUDA_ARCH__ >= 1000
constexpr int kElementBlocksPerSm = 1;
#else
constexpr int kElementBlocksPerSm = 2;
#endif

template <typename T, int kAccess, int kElementBytes>
__device__ constexpr int turned_blocks_per_sm() {
  if (sizeof(T) == 2 && kAccess <= 1) return kElementBlocksPerSm;
  const bool is_large = sizeof(T) == 2 && kElementBytes == 4;
  return is_large || kAccess == 0 ? 3 : 4;
}

// One tile a block. Dynamic shared memory: the tile of the result.
// kAccess: elements of x that lie side by side, at multiples of their size; 0: all of a row does,
// at any address. kIsAligned: rows of out start and end at multiples of 16 bytes.
template <class Sink, typename T, int kAccess, bool kIsAligned>
__global__ void __launch_bounds__(kThreads, turned_blocks_per_sm<T, kAccess, Sink::kElementBytes>())
    turn_tiles(const T* x, const void* known, unsigned char* out, float* scales, long long rows,
               long long columns, long long row_stride, long long column_stride, unsigned row_tiles,
               unsigned column_tiles, unsigned group, long long all_rows, long long known_stride,
               long long pitch, long long size1, long long size2, long long size3,
               long long stride0, long long stride1, long long stride2, long long stride3) {
  constexpr int kWidth = kVecWidth<T>;
  constexpr int kBytes = Sink::kElementBytes;
  using Tile = TurnedTile<kBytes, kTile<T>>;
  extern __shared__ uint4 memory[];
  pdl_launch_dependents();
  const Dims batch = {{1, size1, size2, size3}, {stride0, stride1, stride2, stride3}};
  const auto [matrix, tile_row, tile_column] =
      tile_place(blockIdx.x, row_tiles, column_tiles, group);
  const long long r = static_cast<long long>(tile_row) * kTurnedRows;
  const long long c = static_cast<long long>(tile_column) * kTile<T>;
  const int tile_rows = static_cast<int>(min(rows - r, static_cast<long long>(kTurnedRows)));
  const int tile_columns = static_cast<int>(min(columns - c, static_cast<long long>(kTile<T>)));
  const long long out_row = matrix * columns + c;
  const T* from = x + batch.offset(matrix) + r * row_stride + c * column_stride;
  unsigned char* to = out + (out_row * rows + r) * kBytes;
  const Tile tile = {reinterpret_cast<unsigned*>(memory)};
  const int block = threadIdx.x / kVecsPerRow;
  const int column = threadIdx.x % kVecsPerRow * kWidth;
  Pack<T, kWidth> held[kHeldRows];
  pdl_wait();
  const bool is_inner = c > 0 && c + kTile<T> + kWidth <= columns;
  const int row = block * kHeldRows;
  if (kAccess == 0 && is_inner) {
    load_realigned(held, from, row, column, tile_rows, row_stride);
  } else {
    load_held<T, kWidth, kAccess == 0 ? 1 : kAccess>(held, from, row, column, tile_rows,
                                                     tile_columns, row_stride, column_stride);
  }
  float inverses[kWidth];
  if constexpr (!Sink::kIsPlain) {
    __shared__ Largests largests;
    __shared__ float4 of_columns[kTile<T> / 4];
    if constexpr (!Sink::kIsGiven) {
      if constexpr (Sink::kIsGroup) {
        largests.put(held);
        __syncthreads();
      }
    }
    // More threads than columns, for the padding behind the last one.
    const int own = threadIdx.x;
    const Scales at = {known, scales, known_stride, pitch};
    const float inverse =
        column_inverse<Sink, T>(at, largests, out_row + own, tile_row, own, tile_columns, all_rows);
    if (own < kTile<T>) reinterpret_cast<float*>(of_columns)[own] = inverse;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kWidth; j += 4) {
      const float4 four = of_columns[(column + j) / 4];
      inverses[j] = four.x;
      inverses[j + 1] = four.y;
      inverses[j + 2] = four.z;
      inverses[j + 3] = four.w;
    }
  }
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    float values[kHeldRows];
#pragma unroll
    for (int k = 0; k < kHeldRows; ++k) values[k] = element(held[k], j);
    unsigned words[Tile::kHeldWords];
    Sink::convert(values, Sink::kIsPlain ? 1.0f : inverses[j], words);
    tile.put(column + j, block, words);
  }
  __syncthreads();
  if constexpr (kIsAligned) {
    tile.store_chunks(to, rows * kBytes, tile_rows * kBytes, tile_columns);
  } else {
    tile.store_words(to, rows * kBytes, tile_rows * kBytes, tile_columns);
  }
}

// `count` packs at any places of x, one behind the other in out; one pack a thread.
template <typename T, typename Out, int kWidth, bool kIsFlat>
__global__ void __launch_bounds__(kThreads)
    cast_packs(const T* x, Out* out, long long count, long long size1, long long size2,
               long long size3, long long stride0, long long stride1, long long stride2,
               long long stride3) {
  pdl_launch_dependents();
  const Dims dims = {{1, size1, size2, size3}, {stride0, stride1, stride2, stride3}};
  const long long number = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x;
  pdl_wait();
  if (number >= count) return;
  float values[kWidth];
  widen(load_pack<T, kWidth>(x + row_offset<kIsFlat>(dims, number, count), 0, 1), values);
  store_pack(out, number, 1, rounded<Out, kWidth>(values));
}

}  // namespace fusedops
