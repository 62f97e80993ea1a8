// Histograms: exact counts of elements by bin, in any order, for any values alike.
//
//   histogram_private   few bins: each thread counts in 16-bit counters of its own, all in the bank
//                       of shared memory that belongs to its lane, so that no value is slower.
//   histogram_shared    counters of a block in shared memory, by atomic additions of one, which the
//                       hardware joins for lanes with the same address.
//   histogram_global    more bins than shared memory holds: counters in global memory, with the
//                       values that come first kept in a cache, so that a frequent one is cheap.
//   histogram_zero      clears the counters that histogram_global adds to.
//   histogram_join      adds up the counters of the blocks.

#include "bins.cuh"
#include "dims.cuh"
#include "memory.cuh"
#include "pdl.cuh"
#include "vec.cuh"

namespace fusedops {

constexpr int kWarp = 32;
constexpr int kPrivateThreads = 384;
constexpr int kSharedThreads = 512;
constexpr int kCacheSlots = 8192;
constexpr int kJoinColumns = 32;
constexpr int kJoinRows = 16;
constexpr unsigned kEmpty = 0xffffffffu;

// Vectors in flight a thread: with few threads a multiprocessor more of them, where counting them
// leaves registers and takes less time than they do.
template <class Counters, class Bins>
constexpr int kLoads = 4;

template <int kCount>
__device__ __forceinline__ void fetch(uint4 (&to)[kCount], const char* from, long long pitch,
                                      int left) {
#pragma unroll
  for (int u = 0; u < kCount; ++u) {
    if (u < left) to[u] = load_stream(from + u * pitch);
  }
}

template <class Counters, class Bins, typename T>
__device__ __forceinline__ void count_vector(Counters& counters, const Bins& bins,
                                             const uint4& vector) {
  constexpr int kWidth = kVecWidth<T>;
  union {
    uint4 words;
    T values[kWidth];
  } read;
  read.words = vector;
#pragma unroll
  for (int j = 0; j < kWidth; j += 2) {
    counters.add(bins.bin(read.values[j]), bins.bin(read.values[j + 1]));
  }
}

// Hands every element of x[0], ..., x[count - 1] to `counters`, among the threads of blockIdx.x.
template <class Counters, class Bins>
__device__ __forceinline__ void count_row(Counters& counters, const Bins& bins,
                                          const typename Bins::Element* x, long long count) {
  using T = typename Bins::Element;
  constexpr int kBatch = kLoads<Counters, Bins>;
  const long long thread = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  const long long threads = static_cast<long long>(gridDim.x) * blockDim.x;
  // A view may begin between two multiples of 16 bytes, and its end lies anywhere.
  const int behind = static_cast<int>(reinterpret_cast<unsigned long long>(x) % kVecBytes);
  const long long head =
      min(count, static_cast<long long>(behind == 0 ? 0 : (kVecBytes - behind) / (int)sizeof(T)));
  const long long vectors = (count - head) / kVecWidth<T>;
  const long long tail = head + vectors * kVecWidth<T>;
  const char* from = reinterpret_cast<const char*>(x + head) + thread * kVecBytes;
  const long long pitch = threads * kVecBytes;
  int left = static_cast<int>((vectors - thread + threads - 1) / threads);
  uint4 next[kBatch];
  fetch(next, from, pitch, left);
#pragma unroll 1
  while (left > 0) {
    uint4 now[kBatch];
#pragma unroll
    for (int u = 0; u < kBatch; ++u) now[u] = next[u];
    from += kBatch * pitch;
    fetch(next, from, pitch, left - kBatch);
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      if (u < left) count_vector<Counters, Bins, T>(counters, bins, now[u]);
    }
    left -= kBatch;
  }
  const long long ends = head + count - tail;
  if (thread < ends) {
    const long long place = thread < head ? thread : tail + thread - head;
    counters.add(bins.bin(x[place]), bins.bins);
  }
}

// The same for elements at any places.
template <class Counters, class Bins>
__device__ __forceinline__ void count_places(Counters& counters, const Bins& bins,
                                             const typename Bins::Element* x, long long count,
                                             const Dims& places) {
  const unsigned long long threads = static_cast<unsigned long long>(gridDim.x) * blockDim.x;
  unsigned long long i = static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x;
#pragma unroll 1
  for (; i < count; i += threads) counters.add(bins.bin(x[places.offset(i)]), bins.bins);
}

// What every counting kernel takes behind its pointers.
#define FUSEDOPS_HISTOGRAM_PARAMETERS                                                          \
  long long count, int bin_count, long long lo, long long hi, long long step, long long scale, \
      long long slack, long long size1, long long size2, long long size3, long long stride0,   \
      long long stride1, long long stride2, long long stride3
#define FUSEDOPS_HISTOGRAM_SPEC Bins(BinSpec{bin_count, lo, hi, step, scale, slack})
#define FUSEDOPS_HISTOGRAM_PLACES                                    \
  Dims {                                                             \
    {1, size1, size2, size3}, { stride0, stride1, stride2, stride3 } \
  }

// Row `bin` of 16-bit counters, one column a thread; a last row takes what is not counted. Threads
// of two warps share the halves of a word, so that a lane always meets its own bank.
struct PrivateCounters {
  unsigned short* mine;

  __device__ __forceinline__ void add(int a, int b) {
    unsigned short* first = mine + a * kPrivateThreads;
    unsigned short* second = mine + b * kPrivateThreads;
    // Both are read before either is written, so that their latencies overlap.
    const unsigned of_first = *first + 1u;
    const unsigned of_second = *second + 1u;
    *first = static_cast<unsigned short>(of_first);
    *second = static_cast<unsigned short>(a == b ? of_first + 1u : of_second);
  }
};

template <typename T>
inline constexpr int kLoads<PrivateCounters, IndexBins<T>> = sizeof(T) == 1 ? 4 : 8;
template <>
inline constexpr int kLoads<PrivateCounters, RangeBins<float>> = 8;

// parts[blockIdx.x][bin]. A thread must not meet more than 65535 elements: the plan sees to it.
template <class Bins, bool kGather>
__global__ void __launch_bounds__(kPrivateThreads, 1)
    histogram_private(const typename Bins::Element* x, unsigned* parts,
                      FUSEDOPS_HISTOGRAM_PARAMETERS) {
  extern __shared__ uint4 dynamic[];
  pdl_launch_dependents();
  const Bins bins = FUSEDOPS_HISTOGRAM_SPEC;
  const int words = (bin_count + 1) * kPrivateThreads / 2;
  for (int i = threadIdx.x; i < words / 4; i += kPrivateThreads)
    dynamic[i] = make_uint4(0, 0, 0, 0);
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  unsigned short* counters = reinterpret_cast<unsigned short*>(dynamic);
  PrivateCounters own = {counters + warp / 2 * 2 * kWarp + 2 * lane + warp % 2};
  __syncthreads();
  pdl_wait();
  if constexpr (kGather) {
    count_places(own, bins, x, count, FUSEDOPS_HISTOGRAM_PLACES);
  } else {
    count_row(own, bins, x, count);
  }
  __syncthreads();
  constexpr int kWords = kPrivateThreads / 2;
  const unsigned* pairs = reinterpret_cast<const unsigned*>(dynamic);
#pragma unroll 1
  for (int bin = warp; bin < bin_count; bin += kPrivateThreads / kWarp) {
    unsigned sum = 0;
#pragma unroll
    for (int i = 0; i < kWords; i += kWarp) {
      const unsigned pair = pairs[bin * kWords + i + lane];
      sum += (pair & 0xffffu) + (pair >> 16);
    }
    sum = __reduce_add_sync(0xffffffffu, sum);
    if (lane == 0) parts[static_cast<long long>(blockIdx.x) * bin_count + bin] = sum;
  }
}

// Where a bin's counter lies: bins that are multiples of 32 apart get different banks. Its own
// inverse.
__device__ __forceinline__ unsigned slot_of(unsigned bin) { return bin ^ (bin >> 5 & 31u); }

// The bins first, ..., first + size - 1; the others belong to other blocks.
struct SharedCounters {
  unsigned* slots;
  unsigned first;
  unsigned size;

  __device__ __forceinline__ void add(int bin) {
    const unsigned own = static_cast<unsigned>(bin) - first;
    if (own < size) atomicAdd(slots + slot_of(own), 1u);
  }
  __device__ __forceinline__ void add(int a, int b) {
    add(a);
    add(b);
  }
};

// parts[blockIdx.x][bin]; blockIdx.y takes the `group` bins from blockIdx.y * group on.
template <class Bins, bool kGather>
__global__ void __launch_bounds__(kSharedThreads)
    histogram_shared(const typename Bins::Element* x, unsigned* parts, int group,
                     FUSEDOPS_HISTOGRAM_PARAMETERS) {
  extern __shared__ uint4 dynamic[];
  pdl_launch_dependents();
  const Bins bins = FUSEDOPS_HISTOGRAM_SPEC;
  unsigned* slots = reinterpret_cast<unsigned*>(dynamic);
  const int first = blockIdx.y * group;
  const int size = min(group, bin_count - first);
  for (int i = threadIdx.x; i < (size + 31) / 32 * 32; i += kSharedThreads) slots[i] = 0;
  SharedCounters own = {slots, static_cast<unsigned>(first), static_cast<unsigned>(size)};
  __syncthreads();
  pdl_wait();
  if constexpr (kGather) {
    count_places(own, bins, x, count, FUSEDOPS_HISTOGRAM_PLACES);
  } else {
    count_row(own, bins, x, count);
  }
  __syncthreads();
  unsigned* part = parts + static_cast<long long>(blockIdx.x) * bin_count + first;
  for (int i = threadIdx.x; i < size; i += kSharedThreads) part[i] = slots[slot_of(i)];
}

// A slot of the cache belongs to the first bin that came to it; other bins go to global memory.
struct CachedCounters {
  unsigned* tags;
  unsigned* counts;
  unsigned long long* totals;
  unsigned size;

  __device__ __forceinline__ void add(int bin) {
    const unsigned wanted = static_cast<unsigned>(bin);
    if (wanted >= size) return;
    const unsigned slot = wanted * 0x9e3779b1u / (0xffffffffu / kCacheSlots + 1u);
    unsigned tag = tags[slot];
    if (tag == kEmpty) {
      tag = atomicCAS(tags + slot, kEmpty, wanted);
      if (tag == kEmpty) tag = wanted;
    }
    if (tag == wanted) {
      atomicAdd(counts + slot, 1u);
    } else {
      atomicAdd(totals + wanted, 1ull);
    }
  }
  __device__ __forceinline__ void add(int a, int b) {
    add(a);
    add(b);
  }
};

// Adds to `totals`, which histogram_zero has cleared.
template <class Bins, bool kGather>
__global__ void __launch_bounds__(kSharedThreads)
    histogram_global(const typename Bins::Element* x, unsigned long long* totals,
                     FUSEDOPS_HISTOGRAM_PARAMETERS) {
  extern __shared__ uint4 dynamic[];
  pdl_launch_dependents();
  const Bins bins = FUSEDOPS_HISTOGRAM_SPEC;
  unsigned* tags = reinterpret_cast<unsigned*>(dynamic);
  unsigned* counts = tags + kCacheSlots;
  for (int i = threadIdx.x; i < kCacheSlots; i += kSharedThreads) {
    tags[i] = kEmpty;
    counts[i] = 0;
  }
  CachedCounters own = {tags, counts, totals, static_cast<unsigned>(bin_count)};
  __syncthreads();
  pdl_wait();
  if constexpr (kGather) {
    count_places(own, bins, x, count, FUSEDOPS_HISTOGRAM_PLACES);
  } else {
    count_row(own, bins, x, count);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kCacheSlots; i += kSharedThreads) {
    if (counts[i] != 0) atomicAdd(totals + tags[i], static_cast<unsigned long long>(counts[i]));
  }
}

__global__ void __launch_bounds__(kSharedThreads)
    histogram_zero(unsigned long long* totals, long long count) {
  pdl_launch_dependents();
  pdl_wait();
  const long long i = static_cast<long long>(blockIdx.x) * kSharedThreads + threadIdx.x;
  if (i < count) totals[i] = 0;
}

// totals[bin]: the sum of parts[0][bin], ..., parts[part_count - 1][bin].
__global__ void __launch_bounds__(kJoinColumns* kJoinRows)
    histogram_join(const unsigned* parts, long long* totals, int bin_count, int part_count) {
  __shared__ long long sums[kJoinRows][kJoinColumns];
  pdl_launch_dependents();
  const int column = threadIdx.x % kJoinColumns;
  const int row = threadIdx.x / kJoinColumns;
  const int bin = blockIdx.x * kJoinColumns + column;
  long long sum = 0;
  pdl_wait();
  if (bin < bin_count) {
#pragma unroll 8
    for (int part = row; part < part_count; part += kJoinRows) {
      sum += parts[static_cast<long long>(part) * bin_count + bin];
    }
  }
  sums[row][column] = sum;
  __syncthreads();
  if (row == 0 && bin < bin_count) {
#pragma unroll
    for (int i = 1; i < kJoinRows; ++i) sum += sums[i][column];
    totals[bin] = sum;
  }
}

}  // namespace fusedops
