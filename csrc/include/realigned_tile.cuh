// A tile of a transpose of small elements whose rows, of x and of out, start between multiples of
// 16 bytes. All accesses to global memory have 16 bytes and are aligned: what lies a few elements
// off is shifted into place on the way, four bytes at a time, so that no element is handled alone.
//
//   load    A thread reads one vector each of kWidth rows, takes what it lacks from its neighbour,
//           and turns the block in registers; the tile holds rows of out.
//   store   Each row of out is written from a multiple of 32 bytes on, so that no two blocks write
//           to one sector. Hence a row of the result may start a few rows of x later than its
//           neighbour, and a tile holds a sector's rows more than it writes of each.
//
// Counted, a vector of 16 bytes takes 5 reads of 4 bytes without bank conflicts, 15 shifts and
// selects and 4 shuffles; gathering it from the rows of x as they stand takes 8 or 16 reads, of
// which four meet in a bank (ShiftedTile, 16383 x 16385 bfloat16: 388 us on an H200, aligned 260).
#pragma once

#include "memory.cuh"
#include "register_transpose.cuh"
#include "vec.cuh"

namespace fusedops {

template <typename T>
struct RealignedTile {
  static constexpr int kThreads = 288;
  // Bytes keep 64 registers of x in a thread, which three blocks have no room for; from sm_100 on
  // the compiler would spill those of larger elements, too.
#if __CUDA_ARCH__ >= 1000
  static constexpr int kBlocksPerSm = 2;
#else
  static constexpr int kBlocksPerSm = sizeof(T) == 1 ? 2 : 3;
#endif
  static constexpr int kWidth = kVecWidth<T>;
  static constexpr int kLanes = sizeof(T) == 1 ? 16 : 32;  // threads along a row of x
  static constexpr int kColumns = (kLanes - 1) * kWidth;   // the last one only helps its neighbour
  static constexpr int kRows = sizeof(T) == 1 ? 256 : 128;
  static constexpr int kSector = 32 / static_cast<int>(sizeof(T));
  static constexpr int kHeld = kRows + kSector;     // rows of x in shared memory
  static constexpr int kStrips = kHeld / kWidth;    // vectors a row of out, too
  static constexpr int kRuns = kRows / kWidth / 8;  // a warp writes eight vectors of four rows
  static constexpr int kQuads = (kColumns + 3) / 4;
  static_assert(kHeld % kWidth == 0 && kRows % (8 * kWidth) == 0, "whole vectors");
  static_assert(kLanes == 32 || kStrips == kThreads / kLanes, "whole warps shuffle");

  // Where row c of out is held, in vectors. The step every kWidth rows lets eight threads that
  // write to rows kWidth apart use all 32 banks.
  static __device__ __forceinline__ constexpr int base(int c) { return c * kStrips + c / kWidth; }
  static constexpr int kBytes = (base(kColumns - 1) + kStrips) * kVecBytes;

  const T* from;  // element (0, 0) of the tile
  T* to;
  long long row_stride;  // of x
  long long out_stride;
  const T* first;  // of the matrix, and behind its last element
  const T* end;
  uint4* held;

  static __device__ __forceinline__ unsigned place(const T* address) {
    return static_cast<unsigned>(reinterpret_cast<unsigned long long>(address) / sizeof(T));
  }
  // Elements of the vector around the first element of row r that lie before it; the same for
  // rows kWidth apart.
  __device__ __forceinline__ int skew(int r) const {
    return static_cast<int>((place(from) + static_cast<unsigned>(row_stride) * r) % kWidth);
  }
  // The first row of x that column c of the tile, a row of out, takes its elements from.
  __device__ __forceinline__ int start(int c) const {
    return static_cast<int>((0u - place(to) - static_cast<unsigned>(out_stride) * c) % kSector);
  }

  // The vector that begins `skew` elements behind the start of this thread's.
  static __device__ __forceinline__ uint4 realigned(const uint4& own, int skew) {
    unsigned words[8] = {own.x, own.y, own.z, own.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[4 + i] = __shfl_down_sync(0xffffffffu, words[i], 1, kLanes);
    }
    const unsigned bytes = static_cast<unsigned>(skew) * static_cast<unsigned>(sizeof(T));
#pragma unroll
    for (int i = 0; i < 6; ++i) words[i] = (bytes & 8) != 0 ? words[i + 2] : words[i];
#pragma unroll
    for (int i = 0; i < 5; ++i) words[i] = (bytes & 4) != 0 ? words[i + 1] : words[i];
    return shifted(words, bytes % 4 * 8);
  }
  // Four words from bit `bits` of the first one on.
  static __device__ __forceinline__ uint4 shifted(const unsigned* words, unsigned bits) {
    if constexpr (sizeof(T) >= 4) return make_uint4(words[0], words[1], words[2], words[3]);
    return make_uint4(
        __funnelshift_r(words[0], words[1], bits), __funnelshift_r(words[1], words[2], bits),
        __funnelshift_r(words[2], words[3], bits), __funnelshift_r(words[3], words[4], bits));
  }

  // Whether every vector that `load` reads lies in the matrix, of which `rows` and `columns` are
  // left from the tile's first element on.
  __device__ __forceinline__ bool reads_inside(long long rows, long long columns) const {
    return from - first >= kWidth - 1 && kHeld <= rows &&
           (rows - kHeld) * row_stride + columns >= kLanes * kWidth;
  }

  // rows, columns: that are left of x, up to kHeld and kColumns.
  template <bool kIsInside>
  __device__ __forceinline__ void load(int rows, int columns) const {
    const int lane = threadIdx.x % kLanes;
#pragma unroll 1
    for (int strip = threadIdx.x / kLanes; strip < kStrips; strip += kThreads / kLanes) {
      uint4 block[kWidth];
      const int first_row = kIsInside ? strip * kWidth : min(strip * kWidth, rows - 1);
      const T* row = from + first_row * row_stride;
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        const T* address = row - place(row) % kWidth + lane * kWidth;
        if (kIsInside || (address >= first && address + kWidth <= end)) {
          block[k] = load_cached(address);
        } else {
          block[k] = make_uint4(0, 0, 0, 0);
        }
        // Behind the last row is that row again; it is not written out.
        if (kIsInside || strip * kWidth + k < rows - 1) row += row_stride;
      }
#pragma unroll
      for (int k = 0; k < kWidth; ++k) block[k] = realigned(block[k], skew(k));
      if (lane < kLanes - 1) {
        uint4* target = held + base(lane * kWidth) + strip;
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
          target[k * kStrips] = block_column<sizeof(T)>(block, k);
        }
      }
    }
    if constexpr (!kIsInside) load_ends(rows, columns);
  }

  // The elements of the matrix in vectors that begin before it or end behind it, one by one.
  __device__ __forceinline__ void load_ends(int rows, int columns) const {
    const T* first_vector = first + (0u - place(first)) % kWidth;
    const T* last_vector = end - place(end) % kWidth;
    __syncthreads();
#pragma unroll 1
    for (int r = threadIdx.x; r < rows; r += kThreads) {
      const T* row = from + r * row_stride;
      T* kept = reinterpret_cast<T*>(held) + r;
#pragma unroll 1
      for (int c = 0; c < columns && row + c < first_vector; ++c) {
        kept[base(c) * kWidth] = row[c];
      }
#pragma unroll 1
      for (int c = columns - 1; c >= 0 && row + c >= last_vector; --c) {
        kept[base(c) * kWidth] = row[c];
      }
    }
  }

  template <bool kIsInside>
  __device__ __forceinline__ void store(int rows, int columns, bool is_first) const {
    const unsigned* words = reinterpret_cast<const unsigned*>(held);
    const T* elements = reinterpret_cast<const T*>(held);
    const int lane = threadIdx.x % 32;
    // Four rows of out whose starts differ by an odd number of words use all 32 banks.
    const unsigned pitch = static_cast<unsigned>(out_stride) * static_cast<unsigned>(sizeof(T));
    const int step_bits = pitch % 2 != 0 ? 2 : pitch % 4 != 0 ? 1 : 0;
#pragma unroll 2
    for (int item = threadIdx.x / 32; item < kQuads * kRuns; item += kThreads / 32) {
      const int quad = item / kRuns;
      const int c = (quad >> step_bits << (step_bits + 2)) + (quad & ((1 << step_bits) - 1)) +
                    (lane / 8 << step_bits);
      const int vector = item % kRuns * 8 + lane % 8;
      if (kIsInside ? kColumns % 4 != 0 && c >= kColumns : c >= columns) continue;
      const int begin = start(c);
      const int r = begin + vector * kWidth;
      T* target = to + c * out_stride + r;
      if (kIsInside || r + kWidth <= rows) {
        const unsigned bytes = static_cast<unsigned>(begin) * static_cast<unsigned>(sizeof(T));
        const unsigned* source = words + (base(c) + vector) * 4 + bytes / 4;
        unsigned read[5];
#pragma unroll
        for (int i = 0; i < (sizeof(T) < 4 ? 5 : 4); ++i) read[i] = source[i];
        store_vector(target, shifted(read, bytes % 4 * 8));
      } else {
#pragma unroll 1
        for (int j = 0; j < rows - r; ++j) target[j] = elements[base(c) * kWidth + r + j];
      }
    }
    if (kIsInside || !is_first) return;
    // What lies before the first multiple of 32 bytes of each row of out.
#pragma unroll 1
    for (int c = threadIdx.x; c < columns; c += kThreads) {
#pragma unroll 1
      for (int r = 0; r < min(start(c), rows); ++r) {
        to[c * out_stride + r] = elements[base(c) * kWidth + r];
      }
    }
  }
};

}  // namespace fusedops
