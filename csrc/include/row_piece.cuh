// A block's piece of a row, read once into shared memory, and the largest element found on the way.
#pragma once

#include "block_reduce.cuh"
#include "convert.cuh"
#include "memory.cuh"
#include "vec.cuh"

namespace fusedops {

constexpr int kSelectThreads = 512;

// The best element of some, the smallest of their threads' best ones, and how many threads had any:
// that many elements are not below it.
struct Extent {
  float best;
  int place;
  float least;
  int threads;
};

struct JoinExtents {
  using Acc = Extent;
  static __device__ __forceinline__ Extent empty() {
    return {-__int_as_float(0x7f800000), 0x7fffffff, __int_as_float(0x7f800000), 0};
  }
  // The first of the largest; a NaN is larger than any number.
  static __device__ __forceinline__ Extent merge(const Extent& a, const Extent& b) {
    const bool is_later = b.place > a.place;
    const float first = is_later ? a.best : b.best;
    const float second = is_later ? b.best : a.best;
    const bool takes_second = !(second <= first) && first == first;
    return {takes_second ? second : first, takes_second == is_later ? b.place : a.place,
            fminf(a.least, b.least), a.threads + b.threads};
  }
};

// A block's piece of a row as float32 in `held`; `begin` is the index of its first element.
struct Piece {
  float* held;
  int begin;
  int count;
};

// Reads a block's piece. Threads see their elements in ascending order.
template <typename T>
__device__ __forceinline__ Extent load_piece(Piece& piece, const T* row, long long stride) {
  constexpr int kWidth = kVecWidth<T>;
  constexpr int kUnroll = 4;
  Extent extent = JoinExtents::empty();
  const auto take = [&](float value, int place) {
    if (!(value <= extent.best) && extent.best == extent.best) {
      extent.best = value;
      extent.place = place;
    } else if (extent.place == 0x7fffffff) {
      extent.place = place;  // nothing but -inf so far
    }
    extent.threads = 1;
  };
  if (stride != 1) {
    for (int i = threadIdx.x; i < piece.count; i += kSelectThreads) {
      const float value = to_float(row[(piece.begin + i) * stride]);
      piece.held[i] = value;
      take(value, piece.begin + i);
    }
  } else {
    const T* from = row + piece.begin;
    const int behind = static_cast<int>(reinterpret_cast<unsigned long long>(from) % kVecBytes);
    const int head =
        min(piece.count, behind == 0 ? 0 : (kVecBytes - behind) / static_cast<int>(sizeof(T)));
    const int vectors = (piece.count - head) / kWidth;
    const int tail = head + vectors * kWidth;
    // Vectors are kept where they are aligned, too.
    piece.held += (4 - head % 4) % 4;
    if (threadIdx.x < head) {
      const float value = to_float(from[threadIdx.x]);
      piece.held[threadIdx.x] = value;
      take(value, piece.begin + threadIdx.x);
    }
#pragma unroll 1
    for (int first = threadIdx.x; first < vectors; first += kUnroll * kSelectThreads) {
      union {
        uint4 words[kUnroll];
        T values[kUnroll * kWidth];
      } read;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int vector = first + u * kSelectThreads;
        if (vector < vectors) read.words[u] = load_stream(from + head + vector * kWidth);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int vector = first + u * kSelectThreads;
        if (vector < vectors) {
          const int place = head + vector * kWidth;
#pragma unroll
          for (int j = 0; j < kWidth; j += 4) {
            float4 four;
            four.x = to_float(read.values[u * kWidth + j]);
            four.y = to_float(read.values[u * kWidth + j + 1]);
            four.z = to_float(read.values[u * kWidth + j + 2]);
            four.w = to_float(read.values[u * kWidth + j + 3]);
            *reinterpret_cast<float4*>(piece.held + place + j) = four;
            take(four.x, piece.begin + place + j);
            take(four.y, piece.begin + place + j + 1);
            take(four.z, piece.begin + place + j + 2);
            take(four.w, piece.begin + place + j + 3);
          }
        }
      }
    }
    const int last = tail + static_cast<int>(threadIdx.x);
    if (last < piece.count) {
      const float value = to_float(from[last]);
      piece.held[last] = value;
      take(value, piece.begin + last);
    }
  }
  if (extent.threads) extent.least = extent.best;
  return extent;
}

}  // namespace fusedops
