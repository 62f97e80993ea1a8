// Idea: the lanes of a warp that hold the same value find each other (match.any) and one of
//   them adds for all: no two lanes meet in a bin, whatever the data.
// Wall: latency, and a step down (2060 us uniform, 264 with one value). The match takes as many
//   rounds as there are different values, and what it saves, equal bins, hardware joined for
//   nothing.
// Lever: find equal values among a thread's own bytes, which costs no warp-wide instruction.

#include "shared_bins.cuh"

namespace fusedops {

constexpr int kThreads = 256;
constexpr int kCopies = kThreads / 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// `counts` as in histogram_v1; x is aligned to 16 bytes.
__global__ void __launch_bounds__(kThreads)
    histogram_v5(const unsigned char* x, unsigned* counts, long long count) {
  __shared__ unsigned bins[kCopies * kBins];
  clear_bins(bins, kCopies);
  const int lane = threadIdx.x % 32;
  unsigned* mine = bins + threadIdx.x / 32 * kBins;
  const uint4* vectors = reinterpret_cast<const uint4*>(x);
  const long long threads = static_cast<long long>(gridDim.x) * kThreads;
  const long long warp_first = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x - lane;
  // The bound is the same for all lanes, so that none has left when the others ask it.
  for (long long first = warp_first; first < count / 16; first += threads) {
    const bool inside = first + lane < count / 16;
    const unsigned lanes = __ballot_sync(kAllLanes, inside);
    if (!inside) continue;
    const uint4 vector = vectors[first + lane];
#pragma unroll
    for (int k = 0; k < 16; ++k) {
      const unsigned value = byte_of(vector, k);
      const unsigned peers = __match_any_sync(lanes, value);
      if (__ffs(peers) - 1 == lane) atomicAdd(&mine[value], __popc(peers));
    }
    __syncwarp(lanes);
  }
  count_tail(x, count, bins);
  flush_bins(bins, kCopies, counts);
}

}  // namespace fusedops
