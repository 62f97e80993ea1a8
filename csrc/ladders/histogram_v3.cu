// Idea: 16 bytes a load, counted one after the other.
// Wall: shared atomics, with uniform data (125 us on an H200): lanes whose bins differ and lie in
//   one bank take turns. Lanes with the same bin do not, since hardware joins additions of one:
//   skewed data and one value take 64 us, near the memory's rate. So the time depends on the data.
// Lever: keep warps apart, with a copy of the bins for each.

#include "shared_bins.cuh"

namespace fusedops {

// `counts` as in histogram_v1; x is aligned to 16 bytes.
__global__ void histogram_v3(const unsigned char* x, unsigned* counts, long long count) {
  __shared__ unsigned bins[kBins];
  clear_bins(bins, 1);
  const uint4* vectors = reinterpret_cast<const uint4*>(x);
  const long long threads = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < count / 16;
       i += threads) {
    const uint4 vector = vectors[i];
#pragma unroll
    for (int k = 0; k < 16; ++k) atomicAdd(&bins[byte_of(vector, k)], 1u);
  }
  count_tail(x, count, bins);
  flush_bins(bins, 1, counts);
}

}  // namespace fusedops
