// Idea: no atomics. Each thread has 256 counters of its own, of 16 bits, all in the bank of shared
//   memory that belongs to its lane: no value can make lanes meet.
// Wall: load units. A byte costs a load and a store of shared memory, and only twelve warps hold
//   their counters there. That is half the memory's rate, but nearly the same whatever the data;
//   atomic additions of one take from half to more than all of this time.
// Lever: none that suits all data; count while the data is written.

#include "memory.cuh"
#include "shared_bins.cuh"

namespace fusedops {

constexpr int kThreads = 384;  // 192 KiB of counters: what a multiprocessor has
constexpr int kLoads = 4;      // vectors under way while as many are counted
constexpr int kWords = kThreads / 2;

// Counts two values; both counters are read before one is written, so that the waits overlap.
__device__ __forceinline__ void count_pair(unsigned short* mine, unsigned a, unsigned b) {
  unsigned short* first = mine + a * kThreads;
  unsigned short* second = mine + b * kThreads;
  const unsigned of_first = *first + 1u;
  const unsigned of_second = *second + 1u;
  *first = static_cast<unsigned short>(of_first);
  *second = static_cast<unsigned short>(a == b ? of_first + 1u : of_second);
}

__device__ __forceinline__ void count_vector(unsigned short* mine, const uint4& vector) {
#pragma unroll
  for (int k = 0; k < 16; k += 2) {
    count_pair(mine, byte_of(vector, k), byte_of(vector, k + 1));
  }
}

__device__ __forceinline__ void load_some(uint4 (&to)[kLoads], const uint4* from, long long pitch,
                                          int left) {
#pragma unroll
  for (int u = 0; u < kLoads; ++u) {
    if (u < left) to[u] = load_stream(from + u * pitch);
  }
}

// `counts` as in histogram_v1; x is aligned to 16 bytes. Shared: kBins x kThreads counters. No
// thread may meet more than 65535 bytes: the launch takes blocks enough.
__global__ void __launch_bounds__(kThreads, 1)
    histogram_v7(const unsigned char* x, unsigned* counts, long long count) {
  extern __shared__ uint4 rows[];
  __shared__ unsigned sums[kBins];
  for (int i = threadIdx.x; i < kBins * kWords / 4; i += kThreads) rows[i] = make_uint4(0, 0, 0, 0);
  __syncthreads();
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  // Threads of two warps share the halves of a word, so that lane l meets bank l in every row.
  const int column = warp / 2 * 64 + 2 * lane + warp % 2;
  // A number, to which a value's row is one multiply-add; a pointer would take a second addition.
  unsigned begin = static_cast<unsigned>(__cvta_generic_to_shared(rows)) + column * 2;
  long long thread = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x;
  // Both stay in registers: the compiler would compute them again for every vector.
  asm volatile("" : "+r"(begin), "+l"(thread));
  unsigned short* mine = static_cast<unsigned short*>(__cvta_shared_to_generic(begin));
  const long long threads = static_cast<long long>(gridDim.x) * kThreads;
  const uint4* from = reinterpret_cast<const uint4*>(x) + thread;
  int left = static_cast<int>((count / 16 - thread + threads - 1) / threads);
  uint4 next[kLoads];
  load_some(next, from, threads, left);
#pragma unroll 1
  while (left > 0) {
    uint4 now[kLoads];
#pragma unroll
    for (int u = 0; u < kLoads; ++u) now[u] = next[u];
    from += kLoads * threads;
    load_some(next, from, threads, left - kLoads);
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      if (u < left) count_vector(mine, now[u]);
    }
    left -= kLoads;
  }
  const long long tail = count / 16 * 16 + thread;
  if (tail < count) ++mine[x[tail] * kThreads];
  __syncthreads();
  // The blocks end together, and an addition of each bin by itself would queue up at the L2: a warp
  // adds 32 of them at once.
  const unsigned* words = reinterpret_cast<const unsigned*>(rows);
#pragma unroll 1
  for (int bin = warp; bin < kBins; bin += kThreads / 32) {
    unsigned sum = 0;
#pragma unroll
    for (int i = 0; i < kWords; i += 32) {
      const unsigned pair = words[bin * kWords + i + lane];
      sum += (pair & 0xffffu) + (pair >> 16);
    }
    sum = __reduce_add_sync(0xffffffffu, sum);
    if (lane == 0) sums[bin] = sum;
  }
  flush_bins(sums, 1, counts);
}

}  // namespace fusedops
