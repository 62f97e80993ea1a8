// A tile of a transpose that converts what it moves: 128 rows of x by 256 bytes of each. A thread
// holds a vector each of eight neighbouring rows, converts its columns one after the other, and
// puts eight neighbouring elements of a row of the result into shared memory; from there a row is
// written 16 bytes at a time, or, where rows start anywhere, by aligned words.
#pragma once

#include "memory.cuh"
#include "pack.cuh"
#include "tiles.cuh"

namespace fusedops {

constexpr int kHeldRows = 8;  // of x, by one thread
constexpr int kTurnedRows = kThreads / kVecsPerRow * kHeldRows;

// `kColumns` rows of the result, with kTurnedRows elements of kElementBytes each.
template <int kElementBytes, int kColumns>
struct TurnedTile {
  static constexpr int kWidth = kColumns / kVecsPerRow;  // columns that a thread holds
  static constexpr int kRowBytes = kTurnedRows * kElementBytes;
  static constexpr int kRowWords = kRowBytes / 4;
  static constexpr int kChunks = kRowBytes / kVecBytes;  // what is written at once
  static constexpr int kBytes = kColumns * kRowBytes;

  // What a thread writes to shared memory at once: kHeldRows elements, or 16 bytes of them.
  static constexpr int kHeldWords = kHeldRows * kElementBytes / 4;
  static constexpr int kUnitWords = kHeldWords < 4 ? kHeldWords : 4;
  static constexpr int kSpread = 32 / kUnitWords;  // units that all 32 banks hold

  unsigned* words;

  // Where word w of row c is. Units of a row are permuted by the thread that writes them, so that
  // neighbouring threads, which write the same unit of rows kWidth apart, use all 32 banks.
  static __device__ __forceinline__ int place(int c, int w) {
    const int unit = (w / kUnitWords) ^ (c / kWidth % kSpread);
    return c * kRowWords + unit * kUnitWords + w % kUnitWords;
  }

  // Elements kHeldRows * block, ... of row c.
  __device__ __forceinline__ void put(int c, int block, const unsigned (&held)[kHeldWords]) const {
    if constexpr (kHeldWords == 2) {
      *reinterpret_cast<uint2*>(words + place(c, block * 2)) = make_uint2(held[0], held[1]);
    } else {
#pragma unroll
      for (int i = 0; i < kHeldWords; i += 4) {
        *reinterpret_cast<uint4*>(words + place(c, block * kHeldWords + i)) =
            make_uint4(held[i], held[i + 1], held[i + 2], held[i + 3]);
      }
    }
  }

  __device__ __forceinline__ uint4 chunk(int c, int q) const {
    const int first = place(c, q * 4);
    const uint4 found = *reinterpret_cast<const uint4*>(words + first / 4 * 4);
    // Two units of 8 bytes lie in one chunk, maybe the other way round.
    if (first % 4 == 0) return found;
    return make_uint4(found.z, found.w, found.x, found.y);
  }

  __device__ __forceinline__ unsigned char byte(int c, int b) const {
    return reinterpret_cast<const unsigned char*>(words + place(c, b / 4))[b % 4];
  }

  // Writes `row_bytes` of each of `rows` rows, which lie `pitch` bytes apart. All numbers and
  // addresses are multiples of 16.
  __device__ __forceinline__ void store_chunks(unsigned char* to, long long pitch, int row_bytes,
                                               int rows) const {
#pragma unroll
    for (int step = 0; step < kColumns * kChunks / kThreads; ++step) {
      const int index = step * kThreads + threadIdx.x;
      const int c = index / kChunks;
      const int q = index % kChunks;
      if (c < rows && q * kVecBytes < row_bytes) {
        store_vector(to + c * pitch + q * kVecBytes, chunk(c, q));
      }
    }
  }

  // The same for any number and address; a warp takes a row.
  __device__ __forceinline__ void store_words(unsigned char* to, long long pitch, int row_bytes,
                                              int rows) const {
    const int lane = threadIdx.x % 32;
#pragma unroll 2
    for (int c = threadIdx.x / 32; c < rows; c += kThreads / 32) {
      unsigned char* row = to + c * pitch;
      // Bytes ahead of the first whole word.
      const int head = static_cast<int>((0u - reinterpret_cast<unsigned long long>(row)) % 4);
      if (lane < min(head, row_bytes)) row[lane] = byte(c, lane);
#pragma unroll
      for (int w = lane; w < kRowWords; w += 32) {
        const int first = head + 4 * w;
        if (first + 4 <= row_bytes) {
          const unsigned low = words[place(c, w)];
          const unsigned high = head == 0 ? 0 : words[place(c, w + 1)];
          *reinterpret_cast<unsigned*>(row + first) = __funnelshift_r(low, high, 8 * head);
        } else {
#pragma unroll 1
          for (int b = first; b < row_bytes; ++b) row[b] = byte(c, b);
        }
      }
    }
  }
};

// The vectors of columns c, c + 1, ... in kHeldRows rows of x from row r on. A row behind the last
// one repeats it, which changes no maximum and is not written out; columns behind the last one are
// zeros. kAccess: elements that are read at once, of which `columns` is a multiple.
template <typename T, int kWidth, int kAccess>
__device__ __forceinline__ void load_held(Pack<T, kWidth> (&held)[kHeldRows], const T* x, int r,
                                          int c, int rows, int columns, long long row_stride,
                                          long long column_stride) {
#pragma unroll
  for (int k = 0; k < kHeldRows; ++k) {
    const T* row = x + min(r + k, rows - 1) * row_stride;
    if constexpr (kAccess == kWidth) {
      held[k] = c < columns ? load_pack<T, kWidth>(row + c, 0, 1) : filled_pack<T, kWidth>(0.0f);
    } else {
      union Parts {
        Pack<T, kAccess> read[kWidth / kAccess];
        Pack<T, kWidth> whole;
        __device__ __forceinline__ Parts() {}
      } parts;
#pragma unroll
      for (int i = 0; i < kWidth / kAccess; ++i) {
        const int column = c + i * kAccess;
        parts.read[i] = column < columns ? load_pack<T, kAccess>(row + column * column_stride, 0, 1)
                                         : filled_pack<T, kAccess>(0.0f);
      }
      held[k] = parts.whole;
      // Addresses of single elements take registers: not those of all rows at once.
      if constexpr (kAccess == 1 && kIsPaired<T, kWidth>) {
        forget_widened(held[k]);
        asm volatile("" ::: "memory");
      }
    }
  }
}

// The same where rows of x start at any address, and elements lie side by side: aligned vectors,
// of which each thread takes a part of its own and a part of its neighbour's. They begin before the
// tile and end behind it, where the row must have elements.
template <typename T, int kWidth>
__device__ __forceinline__ void load_realigned(Pack<T, kWidth> (&held)[kHeldRows], const T* x,
                                               int r, int c, int rows, long long row_stride) {
  const bool is_last = threadIdx.x % kVecsPerRow == kVecsPerRow - 1;
  uint4 own[kHeldRows];
  uint4 behind[kHeldRows];
  unsigned skew[kHeldRows];  // bytes of a vector that lie before the elements
#pragma unroll
  for (int k = 0; k < kHeldRows; ++k) {
    const T* first = x + min(r + k, rows - 1) * row_stride + c;
    skew[k] = static_cast<unsigned>(reinterpret_cast<unsigned long long>(first) % kVecBytes);
    const char* aligned = reinterpret_cast<const char*>(first) - skew[k];
    own[k] = load_cached(aligned);
    behind[k] = is_last ? load_cached(aligned + kVecBytes) : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int k = 0; k < kHeldRows; ++k) {
    unsigned words[8] = {own[k].x, own[k].y, own[k].z, own[k].w};
    const unsigned last[4] = {behind[k].x, behind[k].y, behind[k].z, behind[k].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned next = __shfl_down_sync(0xffffffffu, words[i], 1, kVecsPerRow);
      words[4 + i] = is_last ? last[i] : next;
    }
#pragma unroll
    for (int i = 0; i < 6; ++i) words[i] = skew[k] & 8 ? words[i + 2] : words[i];
#pragma unroll
    for (int i = 0; i < 5; ++i) words[i] = skew[k] & 4 ? words[i + 1] : words[i];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = __funnelshift_r(words[i], words[i + 1], 8 * (skew[k] & 3));
    }
    held[k] = same_bits<Pack<T, kWidth>>(make_uint4(words[0], words[1], words[2], words[3]));
  }
}

// Element j, which must be a constant after unrolling, as a float.
template <typename T, int kWidth>
__device__ __forceinline__ float element(const Pack<T, kWidth>& pack, int j) {
  if constexpr (kIsPaired<T, kWidth>) {
    const float2 pair = PairOf<T>::widened(pair_of<T>(pack.words[j / 2]));
    return j % 2 == 0 ? pair.x : pair.y;
  } else {
    return to_float(pack.data[j]);
  }
}

// Element by element the larger magnitude; NaN if one of them is.
template <typename T, int kWidth>
__device__ __forceinline__ Pack<T, kWidth> larger(const Pack<T, kWidth>& a,
                                                  const Pack<T, kWidth>& b) {
  Pack<T, kWidth> most;
  if constexpr (kIsPaired<T, kWidth>) {
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) {
      most.words[i] = same_bits<unsigned>(
          __hmax2_nan(__habs2(pair_of<T>(a.words[i])), __habs2(pair_of<T>(b.words[i]))));
    }
  } else {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) most.data[j] = max_nan(fabsf(a.data[j]), fabsf(b.data[j]));
  }
  return most;
}

}  // namespace fusedops
