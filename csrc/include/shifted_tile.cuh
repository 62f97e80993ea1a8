// A tile of a transpose whose rows, of x and of out, start between multiples of 16 bytes. It is
// read and written 16 bytes at a time all the same: the rows of x from the multiple of 16 bytes
// before them, kept in shared memory as they stand, and each row of out from a multiple of 32 bytes
// on, so that no two blocks write to one sector. Hence a row of the result may start a few rows of
// x later than its neighbour, and a tile holds some rows more than it writes of each.
//
// 8191 x 8193 float32 take 145.5 us so and 163 with loads and stores of single elements (H200).
#pragma once

#include "memory.cuh"
#include "tiles.cuh"
#include "vec.cuh"

namespace fusedops {

constexpr int kSectorBytes = 32;

// T: of 4 or 8 bytes; smaller elements would be gathered one by one (RealignedTile).
template <typename T>
struct ShiftedTile {
  static_assert(sizeof(T) >= 4, "vectors are gathered from whole words");
  static constexpr int kWidth = kVecWidth<T>;
  static constexpr int kRows = 128;
  static constexpr int kColumns = kTile<T>;
  static constexpr int kSector = kSectorBytes / static_cast<int>(sizeof(T));
  static constexpr int kHeld = kRows + kSector - 1;  // rows in shared memory
  static constexpr int kVecs = kVecsPerRow + 1;      // that may hold a part of a row's elements

  // Loads: kVecsPerRow threads a row, and one more vector a row at the end.
  static constexpr int kLoadStep = kThreads / kVecsPerRow;
  static constexpr int kLoads = (kHeld + kLoadStep - 1) / kLoadStep;
  // Stores: a warp writes eight vectors each of four rows of out.
  static constexpr int kRuns = kRows / kWidth / 8;
  static constexpr int kStoreStep = kThreads / 32 / kRuns * 4;
  static_assert(kLoadStep % kWidth == 0, "the skew of a thread's rows of x is one");
  static_assert(kStoreStep % kSector == 0, "the start of a thread's rows of out is one");
  static_assert(kRows % kSector == 0 && kHeld <= kThreads, "neighbouring tiles meet");

  // Where a row of the tile starts, in vectors: kVecs and the steps every kWidth rows are odd, so
  // that eight vectors side by side, or eight rows kWidth apart, use all 32 banks.
  static __device__ __forceinline__ constexpr int base(int r) { return r * kVecs + r / kWidth; }
  static constexpr int kBytes = (base(kHeld - 1) + kVecs) * kVecBytes;

  const T* from;
  T* to;
  long long row_stride;  // of x
  long long out_stride;
  uint4* held;
  unsigned from_place;  // elements, of which only the last bits matter
  unsigned to_place;

  __device__ __forceinline__ ShiftedTile(const T* from, T* to, long long row_stride,
                                         long long out_stride, uint4* held)
      : from(from),
        to(to),
        row_stride(row_stride),
        out_stride(out_stride),
        held(held),
        from_place(static_cast<unsigned>(reinterpret_cast<unsigned long long>(from) / sizeof(T))),
        to_place(static_cast<unsigned>(reinterpret_cast<unsigned long long>(to) / sizeof(T))) {}

  // Elements of row r's first vector that lie before the tile.
  __device__ __forceinline__ int skew(int r) const {
    return static_cast<int>((from_place + static_cast<unsigned>(row_stride) * r) % kWidth);
  }
  // The first row of x that column c of the tile, a row of out, takes its elements from.
  __device__ __forceinline__ int start(int c) const {
    return static_cast<int>((0u - to_place - static_cast<unsigned>(out_stride) * c) % kSector);
  }
  // Where element (r, c) is held, in elements.
  __device__ __forceinline__ int place(int r, int c) const {
    return base(r) * kWidth + c + skew(r);
  }
  // Elements `place[0] + further`, `place[1] + further`, ... as a vector.
  __device__ __forceinline__ uint4 gathered(const int (&place)[kWidth], int further) const {
    const T* elements = reinterpret_cast<const T*>(held);
    unsigned words[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      if constexpr (sizeof(T) == 8) {
        const unsigned long long element = elements[place[q / 2] + further];
        words[q] = static_cast<unsigned>(q % 2 == 0 ? element : element >> 32);
      } else {
        words[q] = elements[place[q] + further];
      }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
  // The vector whose element j is element (j - turn) % kWidth of `vector`.
  static __device__ __forceinline__ uint4 turned(uint4 vector, int turn) {
    const int words = turn * static_cast<int>(sizeof(T) / 4);
    if ((words & 1) != 0) vector = make_uint4(vector.w, vector.x, vector.y, vector.z);
    if ((words & 2) != 0) vector = make_uint4(vector.z, vector.w, vector.x, vector.y);
    return vector;
  }

  // Of a tile that neither begins nor ends x: everything but two pointers is computed once.
  __device__ __forceinline__ void load_inner() const {
    const int r = threadIdx.x / kVecsPerRow;
    const int v = threadIdx.x % kVecsPerRow;
    constexpr int kLast = kHeld - (kLoads - 1) * kLoadStep;  // rows of the last step
    const T* first = from + r * row_stride + v * kWidth - skew(r);
    uint4 read[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      if (k < kLoads - 1 || r < kLast) read[k] = load_cached(first + k * kLoadStep * row_stride);
    }
    const int row = threadIdx.x;
    uint4 end;
    if (row < kHeld) end = load_cached(from + row * row_stride + kColumns - skew(row));
    uint4* kept = held + base(r) + v;
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      if (k < kLoads - 1 || r < kLast) kept[base(k * kLoadStep)] = read[k];
    }
    if (row < kHeld) held[base(row) + kVecsPerRow] = end;
  }

  __device__ __forceinline__ void store_inner() const {
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int c = warp / kRuns * 4 + lane / 8;
    const int r = start(c) + (warp % kRuns * 8 + lane % 8) * kWidth;
    T* target = to + c * out_stride + r;
    // The first row that each thread reads is the same modulo the width, whichever row of out it
    // writes, so that the elements of four rows of out lie in different banks.
    const int turn = static_cast<int>(static_cast<unsigned>(out_stride) * c % kWidth);
    int source[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) source[j] = place(r + (j + turn) % kWidth, c);
#pragma unroll
    for (int k = 0; k < kColumns; k += kStoreStep) {
      store_vector(target + k * out_stride, turned(gathered(source, k), turn));
    }
  }

  // Of any tile. rows, columns: what x has from the tile's first element on.
  __device__ __forceinline__ void load_edge(long long rows, long long columns,
                                            bool is_first) const {
    constexpr int kItems = (kHeld * kVecs + kThreads - 1) / kThreads;
    const int last_row = static_cast<int>(min(rows, static_cast<long long>(kHeld)));
    const int last_column = static_cast<int>(min(columns, static_cast<long long>(kColumns)));
    const int first_readable = is_first ? 0 : -kWidth;
    const auto is_whole = [&](int c) { return c >= first_readable && c + kWidth <= columns; };
    uint4 read[kItems];
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      const int i = k * kThreads + threadIdx.x;
      const int r = i / kVecs;
      const int c = (i - r * kVecs) * kWidth - skew(r);
      if (r < last_row && is_whole(c)) read[k] = load_cached(from + r * row_stride + c);
    }
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      const int i = k * kThreads + threadIdx.x;
      const int r = i / kVecs;
      if (r < kHeld) held[base(r) + i - r * kVecs] = read[k];
    }
    // Vectors that begin before a row or end behind it, element by element.
    __syncthreads();
    T* elements = reinterpret_cast<T*>(held);
#pragma unroll 1
    for (int i = threadIdx.x; i < last_row * kVecs; i += kThreads) {
      const int r = i / kVecs;
      const int c = (i - r * kVecs) * kWidth - skew(r);
      if (is_whole(c)) continue;
#pragma unroll 1
      for (int j = max(c, 0); j < min(c + kWidth, last_column); ++j) {
        elements[place(r, j)] = from[r * row_stride + j];
      }
    }
  }

  __device__ __forceinline__ void store_edge(long long rows, long long columns,
                                             bool is_first) const {
    const T* elements = reinterpret_cast<const T*>(held);
    const int last_row = static_cast<int>(min(rows, static_cast<long long>(kHeld)));
    const int last_column = static_cast<int>(min(columns, static_cast<long long>(kColumns)));
#pragma unroll 1
    for (int i = threadIdx.x; i < kColumns * kRows / kWidth; i += kThreads) {
      const int run = i / 32;
      const int lane = i % 32;
      const int c = run / kRuns * 4 + lane / 8;
      const int r = start(c) + (run % kRuns * 8 + lane % 8) * kWidth;
      if (c >= last_column || r >= last_row) continue;
      T* target = to + c * out_stride + r;
      if (r + kWidth <= last_row) {
        int source[kWidth];
#pragma unroll
        for (int j = 0; j < kWidth; ++j) source[j] = place(r + j, c);
        store_vector(target, gathered(source, 0));
      } else {
#pragma unroll 1
        for (int j = 0; j < last_row - r; ++j) target[j] = elements[place(r + j, c)];
      }
    }
    if (!is_first) return;
    // What lies before the first multiple of 32 bytes of each row of out.
#pragma unroll 1
    for (int c = threadIdx.x; c < last_column; c += kThreads) {
#pragma unroll 1
      for (int r = 0; r < min(start(c), last_row); ++r) {
        to[c * out_stride + r] = elements[place(r, c)];
      }
    }
  }
};

}  // namespace fusedops
