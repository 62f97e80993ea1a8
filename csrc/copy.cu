// out = x, both contiguous and 16-byte aligned: the read + write ceiling of a GPU by the plainest
// kernel. Each block moves one contiguous piece, so that neighbouring blocks sweep the memory
// together.

#include "memory.cuh"
#include "pdl.cuh"

namespace fusedops {

constexpr int kThreads = 256;

// kUnroll vectors a thread, all read before the first is written; `count` vectors.
template <int kUnroll>
__global__ void __launch_bounds__(kThreads) copy(const uint4* x, uint4* out, long long count) {
  pdl_launch_dependents();
  const long long first = static_cast<long long>(blockIdx.x) * kThreads * kUnroll + threadIdx.x;
  pdl_wait();
  if (first + (kUnroll - 1) * kThreads < count) {
    uint4 held[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) held[k] = load_cached(x + first + k * kThreads);
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) out[first + k * kThreads] = held[k];
  } else {
#pragma unroll 1
    for (long long i = first; i < count; i += kThreads) out[i] = x[i];
  }
}

}  // namespace fusedops
