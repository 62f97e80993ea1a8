// Drawing is the argmax of score + noise. A quick approximation of the noise rules out all but a
// few elements, for which it is computed exactly.
#pragma once

#include "noise.cuh"
#include "select_memory.cuh"

namespace fusedops {

// Who is drawn: the largest value; at a tie the better rank.
struct Winner {
  float value;
  unsigned key;
  int index;
};

struct JoinWinners {
  static constexpr int kNobody = 0x7fffffff;
  static __device__ __forceinline__ Winner empty() {
    return {-__int_as_float(0x7f800000), 0xffffffffu, kNobody};
  }
  static __device__ __forceinline__ Winner merge(const Winner& a, const Winner& b) {
    const bool takes_a =
        a.value > b.value ||
        (a.value == b.value && (a.key < b.key || (a.key == b.key && a.index < b.index)));
    return takes_a ? a : b;
  }
  static __device__ __forceinline__ Winner of_warp(Winner winner) {
    if (!__any_sync(kAllLanes, winner.index != kNobody)) return winner;
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) winner = merge(winner, shuffle_xor(winner, step));
    return winner;
  }
};

// The winner of the block's threads; the first one gets it.
template <int kThreads>
__device__ __forceinline__ Winner winner_of_block(const Winner& own) {
  __shared__ Winner of_warps[kThreads / kWarp];
  const Winner best = JoinWinners::of_warp(own);
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = best;
  __syncthreads();
  if (threadIdx.x >= kWarp) return own;
  return JoinWinners::of_warp(threadIdx.x < kThreads / kWarp ? of_warps[threadIdx.x]
                                                             : JoinWinners::empty());
}

// A warp's elements that are drawn from for sure. They are queued until every lane has one, since
// the noise takes as long for one lane as for all.
struct Queue {
  uint2* items;
  int size;

  __device__ __forceinline__ explicit Queue(SelectMemory& memory)
      : items(reinterpret_cast<uint2*>(memory.sorted) + threadIdx.x / kWarp * (2 * kWarp)),
        size(0) {}

  // All lanes together; take(score, index) likewise where there are as many as lanes.
  template <class Take>
  __device__ __forceinline__ void push(bool is_in, float score, int index, Take take) {
    const unsigned lanes = __ballot_sync(kAllLanes, is_in);
    const unsigned lanes_before = lanes & ((1u << threadIdx.x % kWarp) - 1u);
    if (is_in) items[size + __popc(lanes_before)] = make_uint2(__float_as_uint(score), index);
    size += __popc(lanes);
    __syncwarp();
    if (size >= kWarp) {
      size -= kWarp;
      const uint2 item = items[size + threadIdx.x % kWarp];
      __syncwarp();
      take(__uint_as_float(item.x), static_cast<int>(item.y));
    }
  }

  template <class Take>
  __device__ __forceinline__ void flush(Take take) {
    if (static_cast<int>(threadIdx.x % kWarp) < size) {
      const uint2 item = items[threadIdx.x % kWarp];
      take(__uint_as_float(item.x), static_cast<int>(item.y));
    }
    size = 0;
    __syncwarp();
  }
};

// The two largest approximate values that a thread has seen, and who has the first.
struct Approximate {
  float value;
  float second;
  float score;
  int index;

  __device__ __forceinline__ Approximate()
      : value(-__int_as_float(0x7f800000)), second(value), score(0.0f), index(-1) {}

  __device__ __forceinline__ void take(float other, float other_score, int other_index) {
    second = fmaxf(second, fminf(value, other));
    if (other > value) {
      value = other;
      score = other_score;
      index = other_index;
    }
  }
};

}  // namespace fusedops
