// A block's piece of a row, and passes over it. A pass reads the row again: after the first it lies
// in the L2, while to hold 64 rows of a large vocabulary takes more shared memory than a GPU has.
#pragma once

#include "block_reduce.cuh"
#include "convert.cuh"
#include "memory.cuh"
#include "vec.cuh"

namespace fusedops {

constexpr unsigned kAllLanes = 0xffffffffu;

// The elements `begin` .. `begin` + `count` - 1 of a row, the first of them at `from`: `head` ones,
// then aligned vectors, then the rest. Without vectors all are `head`.
//
// Of the vectors a thread reads number t, t + kThreads, ...; likewise of the ends, which are the
// elements outside vectors.
template <typename T>
struct Piece {
  static constexpr int kWidth = kVecWidth<T>;
  const T* from;
  long long stride;
  int begin;
  int count;
  int head;
  int vectors;

  __device__ __forceinline__ Piece(const T* row, long long stride, int length, int chunk, int rank)
      : stride(stride) {
    begin = min(rank * chunk, length);
    count = min(chunk, length - begin);
    from = row + begin * stride;
    const int behind = static_cast<int>(reinterpret_cast<unsigned long long>(from) % kVecBytes);
    head = stride != 1   ? count
           : behind == 0 ? 0
                         : min(count, (kVecBytes - behind) / static_cast<int>(sizeof(T)));
    vectors = (count - head) / kWidth;
  }

  __device__ __forceinline__ int ends() const { return count - vectors * kWidth; }
  __device__ __forceinline__ int place_of_end(int end) const {
    return end < head ? end : end + vectors * kWidth;
  }
  __device__ __forceinline__ int place_of_vector(int vector) const {
    return head + vector * kWidth;
  }
  __device__ __forceinline__ float at(int place) const { return to_float(from[place * stride]); }
};

// A vector of a piece.
template <typename T>
union Read {
  uint4 words;
  T values[kVecWidth<T>];
  __device__ Read() {}

  // Moves each element one place to the front.
  __device__ __forceinline__ void shift() {
    constexpr int kBits = 8 * sizeof(T) % 32;
    words.x = kBits == 0 ? words.y : __funnelshift_r(words.x, words.y, kBits);
    words.y = kBits == 0 ? words.z : __funnelshift_r(words.y, words.z, kBits);
    words.z = kBits == 0 ? words.w : __funnelshift_r(words.z, words.w, kBits);
    words.w = kBits == 0 ? 0 : words.w >> kBits;
  }
};

// Calls each(value) for the elements of a thread, with kUnroll loads in flight.
template <int kThreads, int kUnroll, typename T, class Each>
__device__ __forceinline__ void sweep(const Piece<T>& piece, Each each) {
#pragma unroll 1
  for (int first = threadIdx.x; first < piece.vectors; first += kUnroll * kThreads) {
    Read<T> read[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int vector = first + u * kThreads;
      if (vector < piece.vectors) {
        read[u].words = load_stream(piece.from + piece.place_of_vector(vector));
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (first + u * kThreads < piece.vectors) {
#pragma unroll
        for (int j = 0; j < Piece<T>::kWidth; ++j) each(to_float(read[u].values[j]));
      }
    }
  }
#pragma unroll 1
  for (int end = threadIdx.x; end < piece.ends(); end += kThreads) {
    each(piece.at(piece.place_of_end(end)));
  }
}

// Calls each(value, index in the row, is_there) for the elements of a piece, from one place, for
// passes that do much with an element. The lanes of a warp call it together, with is_there false
// for those that have none.
template <int kThreads, typename T, class Each>
__device__ __forceinline__ void visit(const Piece<T>& piece, Each each) {
  const int ends = piece.ends();
#pragma unroll 1
  for (int first = threadIdx.x / kWarp * kWarp; first < piece.vectors + ends; first += kThreads) {
    const int unit = first + threadIdx.x % kWarp;
    const bool is_vector = unit < piece.vectors;
    const bool is_end = !is_vector && unit < piece.vectors + ends;
    const int place =
        is_vector ? piece.place_of_vector(unit) : piece.place_of_end(unit - piece.vectors);
    Read<T> read;
    read.words = make_uint4(0, 0, 0, 0);
    if (is_vector) read.words = load_stream(piece.from + place);
    if (is_end) read.values[0] = piece.from[place * piece.stride];
    const int steps = first < piece.vectors ? Piece<T>::kWidth : 1;
#pragma unroll 1
    for (int j = 0; j < steps; ++j) {
      each(to_float(read.values[0]), piece.begin + place + j, is_vector || (is_end && j == 0));
      read.shift();
    }
  }
}

}  // namespace fusedops
