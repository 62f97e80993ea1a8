// Reductions over any dimensions, in a fixed order. Positions in the input are 64 bits wide.
//
//   reduce_rows      reduced elements lie side by side: threads along them, 16 bytes at a time.
//   reduce_cluster   the same for few long rows: the blocks of a cluster share a row.
//   reduce_columns   kept elements lie side by side: threads along those.
//   reduce_gather    anything else, one element at a time.
//   reduce_finish    joins the parts into which a row was split, in their order.
//
// kFinal: results are written; otherwise accumulators, one a part, for reduce_finish. No counter or
// lock is left in memory between launches, so a launch that was cut off harms none after it.

#include "block_reduce.cuh"
#include "dims.cuh"
#include "memory.cuh"
#include "pdl.cuh"
#include "ptx.cuh"
#include "reduce_bar.cuh"
#include "reduce_ops.cuh"
#include "vec.cuh"

namespace fusedops {

constexpr int kThreads = 256;

// Loads of 16 bytes in flight a thread: 8 reach the memory's bandwidth. The exponential of a double
// takes so many registers that more than 2 would spill.
template <class Op>
constexpr int kLoads = 8;
template <>
inline constexpr int kLoads<LogSumExp<double>> = 2;

// Elements to fold at once, at most, and threads of reduce_cluster that an SM must have registers
// for (0: its block's). Arg needs elements twice: with more narrow ones it needs more registers.
template <class Op>
constexpr int kBatch = 1 << 30;
template <class Op>
constexpr int kThreadsAtOnce = 0;
template <typename T, bool kLargest>
constexpr int kBatch<Arg<T, kLargest>> = sizeof(T) < 4 ? 16 : 32;
template <typename T, bool kLargest>
constexpr int kThreadsAtOnce<Arg<T, kLargest>> = 1024;

template <class Op, bool kFinal>
__device__ __forceinline__ void write_result(void* results, long long place,
                                             const typename Op::Acc& acc, long long count) {
  if constexpr (kFinal) {
    static_cast<typename Op::Out*>(results)[place] = Op::finish(acc, count);
  } else {
    static_cast<typename Op::Acc*>(results)[place] = acc;
  }
}

// Joins to `acc` those of x[0], ..., x[count - 1] that lie in the vectors lane, lane + lanes, ...,
// which are this thread's; x[0] has position `position`. Up to kMostLoads loads are in flight at
// once. Batches that `bar` does not admit are passed over.
template <class Op, typename T, int kMostLoads, class BarType>
__device__ __forceinline__ typename Op::Acc sweep(typename Op::Acc acc, const T* x, long long count,
                                                  long long position, int lane, int lanes,
                                                  const BarType& bar) {
  constexpr int kWidth = kVecWidth<T>;
  constexpr int kUnroll = kMostLoads < kLoads<Op> ? kMostLoads : kLoads<Op>;
  constexpr int kVectors = kUnroll * kWidth <= kBatch<Op> ? kUnroll : kBatch<Op> / kWidth;
  // A view may begin between two multiples of 16 bytes, and its end lies anywhere.
  const int behind = static_cast<int>(reinterpret_cast<unsigned long long>(x) % kVecBytes);
  const long long head =
      min(count, static_cast<long long>(behind == 0 ? 0 : (kVecBytes - behind) / (int)sizeof(T)));
  const long long vectors = (count - head) / kWidth;
  const long long tail = head + vectors * kWidth;
  const T* body = x + head;
  for (long long i = lane; i < vectors; i += static_cast<long long>(kUnroll) * lanes) {
    union {
      uint4 words[kUnroll];
      T values[kUnroll * kWidth];
    } chunk;
    if (i + (kUnroll - 1ll) * lanes < vectors) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        chunk.words[u] = load_stream(body + (i + static_cast<long long>(u) * lanes) * kWidth);
      }
    } else {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const long long vector = i + static_cast<long long>(u) * lanes;
        if (vector < vectors) {
          chunk.words[u] = load_stream(body + vector * kWidth);
        } else {
#pragma unroll
          for (int j = 0; j < kWidth; ++j) chunk.values[u * kWidth + j] = Op::pad();
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; u += kVectors) {
      const auto& batch = reinterpret_cast<const T(&)[kVectors * kWidth]>(chunk.values[u * kWidth]);
      if (!bar.admits(batch)) continue;
      const long long vector = i + static_cast<long long>(u) * lanes;
      acc = Op::merge(
          acc, Op::template locate<kWidth>(Op::fold(batch), position + head + vector * kWidth,
                                           static_cast<long long>(lanes) * kWidth));
    }
  }
  // The ends: fewer than two vectors' worth of single elements.
#pragma unroll 1
  for (long long i = lane; i < head + count - tail; i += lanes) {
    const long long place = i < head ? i : tail + i - head;
    const T value[1] = {x[place]};
    acc = Op::merge(acc, Op::template locate<1>(Op::fold(value), position + place, 0));
  }
  return acc;
}

// Rows of `segments` pieces of `length` contiguous elements. `lanes` threads a row; blockIdx.y
// takes the `chunk` segments (or elements, where there is one segment) from blockIdx.y * chunk on.
template <class Op, typename T, int kUnroll, bool kFinal>
__global__ void __launch_bounds__(kThreads)
    reduce_rows(const T* x, void* results, long long rows, long long segments, long long length,
                long long chunk, int lanes, long long kept1, long long kept2, long long kept3,
                long long kept_stride0, long long kept_stride1, long long kept_stride2,
                long long kept_stride3, long long outer1, long long outer2, long long outer3,
                long long outer_stride0, long long outer_stride1, long long outer_stride2,
                long long outer_stride3) {
  using Acc = typename Op::Acc;
  pdl_launch_dependents();
  const Dims kept = {{1, kept1, kept2, kept3},
                     {kept_stride0, kept_stride1, kept_stride2, kept_stride3}};
  const Dims outer = {{1, outer1, outer2, outer3},
                      {outer_stride0, outer_stride1, outer_stride2, outer_stride3}};
  const int lane = threadIdx.x % lanes;
  const long long row =
      static_cast<long long>(blockIdx.x) * (kThreads / lanes) + threadIdx.x / lanes;
  Acc acc = Op::empty();
  const T* from = x + (row < rows ? kept.offset<unsigned long long>(row) : 0);
  const long long begin = blockIdx.y * chunk;
  pdl_wait();
  if (row < rows) {
    const bool is_whole = segments == 1;
    const long long end = is_whole ? 1 : min(begin + chunk, segments);
    const long long count = is_whole ? min(chunk, length - begin) : length;
#pragma unroll 1
    for (long long segment = is_whole ? 0 : begin; segment < end; ++segment) {
      const long long position = is_whole ? begin : segment * length;
      const T* piece = from + (is_whole ? begin : outer.offset<unsigned long long>(segment));
      acc = sweep<Op, T, kUnroll>(acc, piece, count, position, lane, lanes, NoBar());
    }
  }
  acc = join_lanes<Op, kThreads>(acc, lanes);
  if (lane == 0 && row < rows) {
    write_result<Op, kFinal>(results, row * gridDim.y + blockIdx.y, acc, segments * length);
  }
}

// One row a cluster of kBlocks blocks, which lie side by side in blockIdx.x; block b takes the
// elements from b * chunk on. The others hand their part to the first block's shared memory.
template <class Op, typename T, int kBlocks, int kBlockThreads>
__global__ void __launch_bounds__(kBlockThreads, kThreadsAtOnce<Op> / kBlockThreads)
    reduce_cluster(const T* x, typename Op::Out* results, long long length, long long chunk,
                   long long kept1, long long kept2, long long kept3, long long kept_stride0,
                   long long kept_stride1, long long kept_stride2, long long kept_stride3) {
  using Acc = typename Op::Acc;
  constexpr int kWords = sizeof(Acc) / 4;
  __shared__ union Parts {
    unsigned words[kBlocks * kWords];
    Acc acc[kBlocks];
    __device__ Parts() {}
  } parts;
  pdl_launch_dependents();
  cluster_arrive();  // that this block runs; waited for before the first block is written to
  const Dims kept = {{1, kept1, kept2, kept3},
                     {kept_stride0, kept_stride1, kept_stride2, kept_stride3}};
  const unsigned rank = cluster_rank();
  const unsigned long long row = blockIdx.x / kBlocks;
  const long long begin = min(rank * chunk, length);
  const T* from = x + kept.offset(row) + begin;
  const Bar<Op> bar = Bar<Op>::of_block();
  pdl_wait();
  Acc acc = sweep<Op, T, 8>(Op::empty(), from, min(chunk, length - begin), begin, threadIdx.x,
                            kBlockThreads, bar);
  acc = join_lanes<Op, kBlockThreads>(acc, kBlockThreads);
  cluster_wait();
  if (threadIdx.x == 0) {
    union Words {
      unsigned words[kWords];
      Acc acc;
      __device__ Words() {}
    } own;
    own.acc = acc;
#pragma unroll
    for (int i = 0; i < kWords; ++i) store_remote(parts.words + rank * kWords + i, 0, own.words[i]);
  }
  cluster_arrive();
  cluster_wait();
  if (rank == 0 && threadIdx.x == 0) {
#pragma unroll
    for (int i = 1; i < kBlocks; ++i) acc = Op::merge(acc, parts.acc[i]);
    results[row] = Op::finish(acc, length);
  }
}

// kWidth neighbouring elements, read at once.
template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth) Pack {
  T data[kWidth];
};

template <typename T, int kWidth>
__device__ __forceinline__ Pack<T, kWidth> load_pack(const T* from) {
  if constexpr (sizeof(Pack<T, kWidth>) == kVecBytes) {
    union Bits {
      uint4 vector;
      Pack<T, kWidth> pack;
      __device__ __forceinline__ Bits() {}
    } bits;
    bits.vector = load_stream(from);
    return bits.pack;
  } else {
    return *reinterpret_cast<const Pack<T, kWidth>*>(from);
  }
}

// Results along `columns` contiguous elements, of which each thread keeps kWidth: `lanes` threads
// side by side, the others of the block on further rows. blockIdx.y takes `chunk` of the `length`
// rows; blockIdx.x walks the blocks of columns, then the other kept dimensions.
template <class Op, typename T, int kWidth, bool kFinal>
__global__ void __launch_bounds__(kThreads)
    reduce_columns(const T* x, void* results, long long columns, long long length, long long chunk,
                   unsigned column_blocks, int lanes, long long kept1, long long kept2,
                   long long kept3, long long kept_stride0, long long kept_stride1,
                   long long kept_stride2, long long kept_stride3, long long row1, long long row2,
                   long long row3, long long row_stride0, long long row_stride1,
                   long long row_stride2, long long row_stride3) {
  using Acc = typename Op::Acc;
  constexpr int kUnroll = kLoads<Op>;
  __shared__ union Shared {
    Acc acc[kThreads / 2 * kWidth];
    __device__ Shared() {}
  } shared;
  pdl_launch_dependents();
  const Dims kept = {{1, kept1, kept2, kept3},
                     {kept_stride0, kept_stride1, kept_stride2, kept_stride3}};
  const Dims rows = {{1, row1, row2, row3}, {row_stride0, row_stride1, row_stride2, row_stride3}};
  const unsigned outer = blockIdx.x / column_blocks;
  const unsigned column_block = blockIdx.x - outer * column_blocks;
  const int step = kThreads / lanes;
  const int first = threadIdx.x / lanes;
  const long long column =
      (static_cast<long long>(column_block) * lanes + threadIdx.x % lanes) * kWidth;
  const long long begin = blockIdx.y * chunk;
  const long long end = min(begin + chunk, length);
  const T* from = x + kept.offset(outer) + column;
  Acc acc[kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) acc[j] = Op::empty();
  pdl_wait();
  if (column < columns && length <= row3) {
    // Rows of one dimension are a stride apart.
    const long long pitch = row_stride3 * step;
    for (long long r = begin + first; r < end; r += static_cast<long long>(kUnroll) * step) {
      const T* row = from + r * row_stride3;
      Pack<T, kWidth> read[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (r + static_cast<long long>(u) * step < end) {
          read[u] = load_pack<T, kWidth>(row + u * pitch);
        } else {
#pragma unroll
          for (int j = 0; j < kWidth; ++j) read[u].data[j] = Op::pad();
        }
      }
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        T values[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) values[u] = read[u].data[j];
        acc[j] = Op::merge(acc[j], Op::template locate<1>(Op::fold(values), r, step));
      }
    }
  } else if (column < columns) {
#pragma unroll 1
    for (long long r = begin + first; r < end; r += step) {
      const auto place = rows.offset(static_cast<unsigned long long>(r));
      const auto read = load_pack<T, kWidth>(from + place);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const T value[1] = {read.data[j]};
        acc[j] = Op::merge(acc[j], Op::template locate<1>(Op::fold(value), r, 0));
      }
    }
  }
  for (int half = step / 2; half > 0; half /= 2) {
    Acc* slot = shared.acc + (threadIdx.x % (half * lanes)) * kWidth;
    if (first >= half && first < 2 * half) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) slot[j] = acc[j];
    }
    __syncthreads();
    if (first < half) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) acc[j] = Op::merge(acc[j], slot[j]);
    }
    __syncthreads();
  }
  if (first == 0 && column < columns) {
    const long long place = outer * columns + column;
    const long long outputs = gridDim.x / column_blocks * columns;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      write_result<Op, kFinal>(results, blockIdx.y * outputs + place + j, acc[j], length);
    }
  }
}

// Rows of `length` elements at any places. `lanes` threads a row; blockIdx.y takes `chunk`
// elements.
template <class Op, typename T, bool kFinal>
__global__ void __launch_bounds__(kThreads)
    reduce_gather(const T* x, void* results, long long rows, long long length, long long chunk,
                  int lanes, long long kept1, long long kept2, long long kept3,
                  long long kept_stride0, long long kept_stride1, long long kept_stride2,
                  long long kept_stride3, long long row1, long long row2, long long row3,
                  long long row_stride0, long long row_stride1, long long row_stride2,
                  long long row_stride3) {
  using Acc = typename Op::Acc;
  constexpr int kUnroll = 4;
  pdl_launch_dependents();
  const Dims kept = {{1, kept1, kept2, kept3},
                     {kept_stride0, kept_stride1, kept_stride2, kept_stride3}};
  const Dims places = {{1, row1, row2, row3}, {row_stride0, row_stride1, row_stride2, row_stride3}};
  const int lane = threadIdx.x % lanes;
  const long long row =
      static_cast<long long>(blockIdx.x) * (kThreads / lanes) + threadIdx.x / lanes;
  const long long begin = blockIdx.y * chunk;
  const long long end = row < rows ? min(begin + chunk, length) : 0;
  const T* from = x + (row < rows ? kept.offset<unsigned long long>(row) : 0);
  Acc acc = Op::empty();
  pdl_wait();
  for (long long i = begin + lane; i < end; i += static_cast<long long>(kUnroll) * lanes) {
    T values[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const unsigned long long place = i + static_cast<long long>(u) * lanes;
      values[u] = place < end ? from[places.offset(place)] : Op::pad();
    }
    acc = Op::merge(acc, Op::template locate<1>(Op::fold(values), i, lanes));
  }
  acc = join_lanes<Op, kThreads>(acc, lanes);
  if (lane == 0 && row < rows) {
    write_result<Op, kFinal>(results, row * gridDim.y + blockIdx.y, acc, length);
  }
}

// result[i] of `parts` accumulators at parts[i * result_stride + p * part_stride].
template <class Op>
__global__ void __launch_bounds__(kThreads)
    reduce_finish(const typename Op::Acc* accumulators, typename Op::Out* results, long long count,
                  long long parts, long long result_stride, long long part_stride, long long length,
                  int lanes) {
  using Acc = typename Op::Acc;
  constexpr int kUnroll = kLoads<Op>;
  pdl_launch_dependents();
  const int lane = threadIdx.x % lanes;
  const long long result =
      static_cast<long long>(blockIdx.x) * (kThreads / lanes) + threadIdx.x / lanes;
  Acc acc = Op::empty();
  pdl_wait();
  if (result < count) {
#pragma unroll 1
    for (long long p = lane; p < parts; p += static_cast<long long>(kUnroll) * lanes) {
      Acc read[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const long long part = p + static_cast<long long>(u) * lanes;
        if (part < parts) read[u] = accumulators[result * result_stride + part * part_stride];
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (p + static_cast<long long>(u) * lanes < parts) acc = Op::merge(acc, read[u]);
      }
    }
  }
  acc = join_lanes<Op, kThreads>(acc, lanes);
  if (lane == 0 && result < count) results[result] = Op::finish(acc, length);
}

}  // namespace fusedops
