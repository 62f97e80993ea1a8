// The few elements of a row that may be among the k best: listed by every block of a cluster,
// collected and sorted by the first.
#pragma once

#include "select_memory.cuh"

namespace fusedops {

// So many are sorted by counting for each how many go before it, which takes two barriers.
constexpr int kCounted = 256;

__device__ __forceinline__ void append(SelectMemory& memory, unsigned key, int index) {
  const unsigned place = atomicAdd(&memory.in_list, 1u);
  if (place < kCandidates) memory.list[place] = static_cast<Mass>(key) << 32 | index;
}

// Lists the elements of a piece with keys up to `last`. Only threads whose best one is among them
// have any: `is_owner`. A few lanes read all elements of such a thread at once. memory.in_list and
// memory.in_owners must be 0, with a barrier behind that.
template <int kThreads, typename T, class KeyOf>
__device__ __forceinline__ void list_of_owners(SelectMemory& memory, const Piece<T>& piece,
                                               bool is_owner, unsigned last, KeyOf key_of) {
  constexpr int kLanes = 16;
  const int lane = threadIdx.x % kLanes;
  if (is_owner) {
    memory.owners[atomicAdd(&memory.in_owners, 1u)] = static_cast<unsigned short>(threadIdx.x);
  }
  __syncthreads();
  const auto take = [&](float value, int place) {
    const unsigned key = key_of(value);
    if (key <= last) append(memory, key, piece.begin + place);
  };
  const int owners = static_cast<int>(memory.in_owners);
  const int ends = piece.ends();
#pragma unroll 1
  for (int i = threadIdx.x / kLanes; i < owners; i += kThreads / kLanes) {
    const int first = memory.owners[i] + lane * kThreads;
#pragma unroll 1
    for (int vector = first; vector < piece.vectors; vector += kLanes * kThreads) {
      Read<T> read;
      read.words = load_stream(piece.from + piece.place_of_vector(vector));
#pragma unroll
      for (int j = 0; j < Piece<T>::kWidth; ++j) {
        take(to_float(read.values[j]), piece.place_of_vector(vector) + j);
      }
    }
#pragma unroll 1
    for (int end = first; end < ends; end += kLanes * kThreads) {
      take(piece.at(piece.place_of_end(end)), piece.place_of_end(end));
    }
  }
}

// How many all blocks list, of which kCandidates at most are there. Behind a cluster barrier.
template <int kBlocks>
__device__ __forceinline__ unsigned listed(const SelectMemory& memory) {
  unsigned all = 0;
#pragma unroll
  for (int rank = 0; rank < kBlocks; ++rank) {
    all += load_remote<kBlocks>(reinterpret_cast<const uint2*>(&memory.in_list), rank).x;
  }
  return all;
}

// Copies the lists of all blocks into this one's `sorted`; returns how many there are. The lists
// must be complete, and their blocks must stay until a barrier behind this.
template <int kBlocks, int kThreads>
__device__ __forceinline__ int collect(SelectMemory& memory) {
  int starts[kBlocks + 1];
  starts[0] = 0;
#pragma unroll
  for (int rank = 0; rank < kBlocks; ++rank) {
    starts[rank + 1] =
        load_remote<kBlocks>(reinterpret_cast<const uint2*>(&memory.in_list), rank).x;
  }
#pragma unroll
  for (int rank = 0; rank < kBlocks; ++rank) starts[rank + 1] += starts[rank];
#pragma unroll 1
  for (int i = threadIdx.x; i < starts[kBlocks]; i += kThreads) {
    int of = 0, start = 0;
#pragma unroll
    for (int rank = 1; rank < kBlocks; ++rank) {
      of = i >= starts[rank] ? rank : of;
      start = i >= starts[rank] ? starts[rank] : start;
    }
    reinterpret_cast<uint2*>(memory.sorted)[i] =
        load_remote<kBlocks>(reinterpret_cast<const uint2*>(memory.list) + i - start, of);
  }
  return starts[kBlocks];
}

// Sorts the first `size` of `sorted`, which differ, by bitonic merges (Batcher, "Sorting networks
// and their applications", 1968), few by counting.
template <int kThreads>
__device__ __forceinline__ void sort_candidates(SelectMemory& memory, int size) {
  if (size <= kCounted) {
    constexpr int kLanes = kThreads / kCounted;
    const int place = threadIdx.x / kLanes;
    __syncthreads();
    const Mass own = place < size ? memory.sorted[place] : 0;
    int rank = 0;
#pragma unroll 4
    for (int i = threadIdx.x % kLanes; i < size; i += kLanes) rank += memory.sorted[i] < own;
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) rank += __shfl_xor_sync(kAllLanes, rank, step);
    __syncthreads();
    if (threadIdx.x % kLanes == 0 && place < size) memory.sorted[rank] = own;
    __syncthreads();
    return;
  }
  const int padded = 1 << (32 - __clz(size - 1));
  for (int i = size + threadIdx.x; i < padded; i += kThreads) memory.sorted[i] = ~0ull;
  __syncthreads();
#pragma unroll 1
  for (int run = 2; run <= padded; run *= 2) {
#pragma unroll 1
    for (int step = run / 2; step > 0; step /= 2) {
      for (int pair = threadIdx.x; pair < padded / 2; pair += kThreads) {
        const int low = 2 * pair - (pair & (step - 1));
        const Mass a = memory.sorted[low];
        const Mass b = memory.sorted[low + step];
        if ((a > b) == ((low & run) == 0)) {
          memory.sorted[low] = b;
          memory.sorted[low + step] = a;
        }
      }
      __syncthreads();
    }
  }
}

}  // namespace fusedops
