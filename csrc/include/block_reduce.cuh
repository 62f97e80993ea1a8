// Joining the accumulators of a block's threads, always in the same order.
#pragma once

#include "ptx.cuh"

namespace fusedops {

constexpr int kWarp = 32;

// The accumulator of the lane `offset` away; of any size that is a multiple of 4 bytes.
template <typename Acc>
__device__ __forceinline__ Acc shuffle_xor(const Acc& acc, int offset) {
  constexpr int kWords = sizeof(Acc) / 4;
  static_assert(sizeof(Acc) % 4 == 0, "accumulators are moved as 32-bit words");
  union Words {
    unsigned words[kWords];
    Acc acc;
    __device__ Words() {}
  } from, to;
  from.acc = acc;
#pragma unroll
  for (int i = 0; i < kWords; ++i)
    to.words[i] = __shfl_xor_sync(0xffffffffu, from.words[i], offset);
  return to.acc;
}

// Joins the accumulators of `lanes` neighbouring threads, a power of two up to the block's size;
// the first of them gets the result, others anything. Every thread of the block must call it.
template <class Op, int kBlockThreads>
__device__ __forceinline__ typename Op::Acc join_lanes(typename Op::Acc acc, int lanes) {
  using Acc = typename Op::Acc;
#pragma unroll 1
  for (int offset = min(lanes, kWarp) / 2; offset > 0; offset /= 2) {
    acc = Op::merge(acc, shuffle_xor(acc, offset));
  }
  if (lanes <= kWarp) return acc;
  __shared__ Acc of_warp[kBlockThreads / kWarp];
  // Taken from one lane: where the compiler does not know that a warp's lanes stay together, each
  // of the shuffles below gets a branch and a copy for lanes apart.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / kWarp, 0);
  const int warps = lanes / kWarp;
  if (threadIdx.x % kWarp == 0) of_warp[warp] = acc;
  __syncthreads();
  // The first warp of a row joins them: a tree takes a fifth of the time of one thread's loop. The
  // others would only share the shuffle unit with it.
  if (warp % warps != 0) return acc;
  acc = of_warp[warp + threadIdx.x % warps];
#pragma unroll 1
  for (int offset = warps / 2; offset > 0; offset /= 2) {
    acc = Op::merge(acc, shuffle_xor(acc, offset));
  }
  return acc;
}

}  // namespace fusedops
