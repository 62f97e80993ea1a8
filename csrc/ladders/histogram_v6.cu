// Idea: a thread sorts four words byte by byte in registers, so equal values stand together and
//   are added at once: with one value everywhere a quarter of the additions.
// Wall: shared atomics, and a step down. Hardware joins additions of one only; of other numbers
//   lanes with one bin take turns, so that one value (275 us) is slower than uniform data (152).
// Lever: no atomics: counters of each thread's own, all in the bank of its lane, so that no value
//   can make lanes meet.

#include "shared_bins.cuh"

namespace fusedops {

constexpr int kThreads = 256;
constexpr int kCopies = kThreads / 32;

// The smaller byte of each of the four pairs to `low`, the larger one to `high`.
__device__ __forceinline__ void order(unsigned& low, unsigned& high) {
  const unsigned smaller = __vminu4(low, high);
  high = __vmaxu4(low, high);
  low = smaller;
}

// Adds four sorted values to the bins, a run at a time.
__device__ __forceinline__ void add_runs(const unsigned (&value)[4], unsigned* bins) {
  unsigned run = 1;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (k < 3 && value[k] == value[k + 1]) {
      ++run;
    } else {
      atomicAdd(&bins[value[k]], run);
      run = 1;
    }
  }
}

// `counts` as in histogram_v1; x is aligned to 16 bytes.
__global__ void __launch_bounds__(kThreads)
    histogram_v6(const unsigned char* x, unsigned* counts, long long count) {
  __shared__ unsigned bins[kCopies * kBins];
  clear_bins(bins, kCopies);
  unsigned* mine = bins + threadIdx.x / 32 * kBins;
  const uint4* vectors = reinterpret_cast<const uint4*>(x);
  const long long threads = static_cast<long long>(gridDim.x) * kThreads;
  for (long long i = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x; i < count / 16;
       i += threads) {
    uint4 v = vectors[i];
    // A network of five comparisons sorts each of the four columns of bytes.
    order(v.x, v.y);
    order(v.z, v.w);
    order(v.x, v.z);
    order(v.y, v.w);
    order(v.y, v.z);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const unsigned sorted[4] = {byte_of(v, k), byte_of(v, k + 4), byte_of(v, k + 8),
                                  byte_of(v, k + 12)};
      add_runs(sorted, mine);
    }
  }
  count_tail(x, count, bins);
  flush_bins(bins, kCopies, counts);
}

}  // namespace fusedops
