// Tokens sorted by expert, stably: counts, exclusive offsets and the permutation.
//
//   experts_block     few ids: one block does everything, with counters of each warp in shared
//                     memory.
//   experts_zero, experts_count, experts_sums, experts_scan, experts_scatter
//                     any number: the counters lie in global memory, an expert a row and a warp a
//                     column, so that one running sum over all of them gives each warp its places.
//
// A warp takes a contiguous piece of the ids, and of 32 at a time a lane finds its rank among those
// with the same expert; so the order within an expert is that of the ids, whatever runs first.

#include "dims.cuh"
#include "pdl.cuh"

namespace fusedops {

constexpr int kWarp = 32;
constexpr int kBlockThreads = 1024;
constexpr int kBlockWarps = kBlockThreads / kWarp;
constexpr int kThreads = 256;
constexpr int kEach = 16;
constexpr int kTile = kThreads * kEach;
constexpr unsigned kAll = 0xffffffffu;

// Ids outside [0, experts) belong to one more expert, the last.
template <typename T>
__device__ __forceinline__ int expert_of(T id, int experts) {
  return static_cast<int>(min(static_cast<unsigned long long>(static_cast<long long>(id)),
                              static_cast<unsigned long long>(experts)));
}

// The sum of the values of the threads before this one; `total` gets that of all.
template <int kCount>
__device__ __forceinline__ unsigned sum_before(unsigned value, unsigned& total) {
  __shared__ unsigned of_warp[kCount / kWarp];
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  unsigned running = value;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const unsigned other = __shfl_up_sync(kAll, running, step);
    if (lane >= step) running += other;
  }
  __syncthreads();  // of_warp may still be read for an earlier call
  if (lane == kWarp - 1) of_warp[warp] = running;
  __syncthreads();
  unsigned before = 0;
  total = 0;
#pragma unroll
  for (int i = 0; i < kCount / kWarp; ++i) {
    if (i == warp) before = total;
    total += of_warp[i];
  }
  return before + running - value;
}

// Writes the positions begin, ..., end - 1 to their places. places[expert * pitch] is the next one
// of each expert in this warp.
template <typename T>
__device__ __forceinline__ void scatter(const T* ids, long long* permutation, unsigned* places,
                                        long long pitch, long long begin, long long end,
                                        int experts, const Dims& dims) {
  const int lane = threadIdx.x % kWarp;
  const unsigned long long size = static_cast<unsigned long long>(end);
  unsigned long long i = begin + lane;
  T next = i < size ? ids[dims.offset(i)] : T(0);
#pragma unroll 1
  for (unsigned long long first = begin; first < size; first += kWarp, i += kWarp) {
    const T id = next;
    if (i + kWarp < size) next = ids[dims.offset(i + kWarp)];
    const bool is_id = i < size;
    const int expert = is_id ? expert_of(id, experts) : -1;
    const unsigned same = __match_any_sync(kAll, expert);
    unsigned* place = places + expert * pitch;
    const unsigned start = is_id ? *place : 0;
    const int rank = __popc(same & ((1u << lane) - 1u));
    __syncwarp();  // every lane has read before one writes
    if (is_id) {
      if (rank == 0) *place = start + __popc(same);
      permutation[start + rank] = static_cast<long long>(i);
    }
    __syncwarp();
  }
}

template <typename T>
__global__ void __launch_bounds__(kBlockThreads)
    experts_block(const T* ids, long long* counts, long long* offsets, long long* permutation,
                  long long count, int experts, long long size1, long long size2, long long size3,
                  long long stride0, long long stride1, long long stride2, long long stride3) {
  extern __shared__ unsigned counters[];  // [warp][expert], the last expert for strangers
  pdl_launch_dependents();
  const Dims dims = {{1, size1, size2, size3}, {stride0, stride1, stride2, stride3}};
  const int rows = experts + 1;
  for (int i = threadIdx.x; i < rows * kBlockWarps; i += kBlockThreads) counters[i] = 0;
  __syncthreads();
  pdl_wait();
  const int warp = threadIdx.x / kWarp;
  unsigned* own = counters + warp * rows;
  const long long chunk = (count + kBlockWarps - 1) / kBlockWarps;
  const long long begin = min(warp * chunk, count);
  const long long end = min(begin + chunk, count);
#pragma unroll 4
  for (long long i = begin + threadIdx.x % kWarp; i < end; i += kWarp) {
    const T id = ids[dims.offset(static_cast<unsigned long long>(i))];
    atomicAdd(own + expert_of(id, experts), 1u);
  }
  __syncthreads();
  unsigned start = 0;
  for (int first = 0; first < rows; first += kBlockThreads) {
    const int expert = first + threadIdx.x;
    unsigned sum = 0;
    if (expert < rows) {
#pragma unroll 8
      for (int w = 0; w < kBlockWarps; ++w) sum += counters[w * rows + expert];
    }
    unsigned total;
    unsigned place = start + sum_before<kBlockThreads>(sum, total);
    start += total;
    if (expert < experts) counts[expert] = sum;
    if (expert < rows) {
      offsets[expert] = place;
#pragma unroll 8
      for (int w = 0; w < kBlockWarps; ++w) {
        const unsigned of_warp = counters[w * rows + expert];
        counters[w * rows + expert] = place;
        place += of_warp;
      }
    }
  }
  __syncthreads();
  scatter(ids, permutation, own, 1, begin, end, experts, dims);
}

__global__ void __launch_bounds__(kThreads) experts_zero(uint4* counters, long long vectors) {
  pdl_launch_dependents();
  pdl_wait();
  const long long i = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < vectors) counters[i] = make_uint4(0, 0, 0, 0);
}

// counters[expert][warp] of `warps` warps, which lie behind one another in the grid.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    experts_count(const T* ids, unsigned* counters, long long count, long long chunk,
                  long long warps, int experts, long long size1, long long size2, long long size3,
                  long long stride0, long long stride1, long long stride2, long long stride3) {
  pdl_launch_dependents();
  const Dims dims = {{1, size1, size2, size3}, {stride0, stride1, stride2, stride3}};
  const long long warp =
      static_cast<long long>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  const long long begin = min(warp * chunk, count);
  const long long end = min(begin + chunk, count);
  pdl_wait();
#pragma unroll 4
  for (long long i = begin + threadIdx.x % kWarp; i < end; i += kWarp) {
    const T id = ids[dims.offset(static_cast<unsigned long long>(i))];
    atomicAdd(counters + expert_of(id, experts) * warps + warp, 1u);
  }
}

// The sum of the kTile counters of each tile, written behind the `vectors` vectors of all of them;
// the counters are padded with zeros to whole tiles.
__global__ void __launch_bounds__(kThreads) experts_sums(uint4* counters, long long vectors) {
  pdl_launch_dependents();
  const uint4* own = counters + static_cast<long long>(blockIdx.x) * (kTile / 4) + threadIdx.x;
  unsigned sum = 0;
  pdl_wait();
#pragma unroll
  for (int i = 0; i < kEach / 4; ++i) {
    const uint4 four = own[i * kThreads];
    sum += four.x + four.y + four.z + four.w;
  }
  unsigned total;
  sum_before<kThreads>(sum, total);
  if (threadIdx.x == 0) reinterpret_cast<unsigned*>(counters + vectors)[blockIdx.x] = total;
}

// Every counter becomes the sum of those before it: the first place of an expert in a warp.
__global__ void __launch_bounds__(kThreads)
    experts_scan(uint4* counters, long long* offsets, long long vectors, long long warps,
                 int experts) {
  pdl_launch_dependents();
  uint4* own = counters + static_cast<long long>(blockIdx.x) * (kTile / 4) +
               static_cast<long long>(threadIdx.x) * (kEach / 4);
  pdl_wait();
  const unsigned* sums = reinterpret_cast<const unsigned*>(counters + vectors);
  unsigned earlier = 0;
  for (unsigned tile = threadIdx.x; tile < blockIdx.x; tile += kThreads) earlier += sums[tile];
  unsigned start;
  sum_before<kThreads>(earlier, start);
  union {
    uint4 vectors[kEach / 4];
    unsigned words[kEach];
  } held;
  unsigned sum = 0;
#pragma unroll
  for (int i = 0; i < kEach / 4; ++i) held.vectors[i] = own[i];
#pragma unroll
  for (int i = 0; i < kEach; ++i) sum += held.words[i];
  unsigned total;
  unsigned place = start + sum_before<kThreads>(sum, total);
  const long long first =
      static_cast<long long>(blockIdx.x) * kTile + static_cast<long long>(threadIdx.x) * kEach;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const unsigned of_warp = held.words[i];
    held.words[i] = place;
    // Warps are a multiple of 16: an expert's first counter is the first of a thread.
    if (i == 0 && first % warps == 0 && first / warps <= experts) offsets[first / warps] = place;
    place += of_warp;
  }
#pragma unroll
  for (int i = 0; i < kEach / 4; ++i) own[i] = held.vectors[i];
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    experts_scatter(const T* ids, unsigned* counters, const long long* offsets, long long* counts,
                    long long* permutation, long long count, long long chunk, long long warps,
                    int experts, long long size1, long long size2, long long size3,
                    long long stride0, long long stride1, long long stride2, long long stride3) {
  pdl_launch_dependents();
  const Dims dims = {{1, size1, size2, size3}, {stride0, stride1, stride2, stride3}};
  const long long warp =
      static_cast<long long>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  const long long begin = min(warp * chunk, count);
  const long long end = min(begin + chunk, count);
  pdl_wait();
  const long long threads = static_cast<long long>(gridDim.x) * kThreads;
  for (long long e = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x; e < experts;
       e += threads) {
    counts[e] = offsets[e + 1] - offsets[e];
  }
  scatter(ids, permutation, counters + warp, warps, begin, end, experts, dims);
}

}  // namespace fusedops
