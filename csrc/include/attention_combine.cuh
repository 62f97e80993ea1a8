// Joining what the warps of a cluster found of one request and one group of heads, in one order
// always. The warps of a block meet in its shared memory; each block then sends every other one its
// maxima and sums, and its share of the result, which it joins and stores. Sending takes one
// barrier behind the work; the one that shows that all blocks run is arrived at when the kernel
// begins.
#pragma once

#include "attention_loads.cuh"
#include "cluster.cuh"

namespace fusedops {

constexpr int kAttentionWarps = 4;
constexpr int kAttentionThreads = 32 * kAttentionWarps;

// Where `local` lies in the shared memory of the cluster's block `rank`.
__device__ __forceinline__ unsigned remote_address(const void* local, unsigned rank) {
  unsigned remote = 0;
#if __CUDA_ARCH__ >= 900
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(local));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
#endif
  return remote;
}

__device__ __forceinline__ void send(const float2& value, float2* local, unsigned rank) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(remote_address(local, rank)),
               "f"(value.x), "f"(value.y)
               : "memory");
#endif
}

__device__ __forceinline__ void send(const float4& value, float4* local, unsigned rank) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(remote_address(local, rank)),
      "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w)
      : "memory");
#endif
}

// Maximum and sum of several parts that have both; a part without keys has minus infinity.
template <int kParts>
__device__ __forceinline__ float2 joined(const float2* parts, int stride) {
  float high = minus_infinity();
#pragma unroll
  for (int i = 0; i < kParts; ++i) high = fmaxf(high, parts[i * stride].x);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    const float2 part = parts[i * stride];
    sum += part.x == minus_infinity() ? 0.0f : part.y * exp2_approximate(part.x - high);
  }
  return make_float2(high, sum);
}

// Four neighbouring results of several parts, brought to the common maximum and added.
template <int kParts>
__device__ __forceinline__ float4 joined(const float2* totals, int stride, float high,
                                         const float4* parts, int pitch) {
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    const float own = totals[i * stride].x;
    const float4 part = parts[i * pitch];
    if (own == minus_infinity()) continue;
    const float fix = exp2_approximate(own - high);
    sum.x = fmaf(part.x, fix, sum.x);
    sum.y = fmaf(part.y, fix, sum.y);
    sum.z = fmaf(part.z, fix, sum.z);
    sum.w = fmaf(part.w, fix, sum.w);
  }
  return sum;
}

template <class Warp, int kCluster>
struct Combine {
  using T = typename Warp::Query;
  static constexpr int kHeads = Warp::kHeads;
  static constexpr int kRow = Warp::kDim / 4;  // float4 a head
  static constexpr int kAll = kHeads * kRow;
  static constexpr int kShare = (kAll + kCluster - 1) / kCluster;

  float4 of_warp[kAttentionWarps][kHeads][kRow];
  float2 totals[kAttentionWarps][kHeads];
  // From each block of the cluster.
  float4 inbox[kCluster == 1 ? 1 : kCluster][kCluster == 1 ? 1 : kShare];
  float2 inbox_totals[kCluster][kHeads];

  // No key: zeros. Keys whose every score is minus infinity, and so every weight zero: NaN, as in
  // any softmax.
  static __device__ __forceinline__ void store(T* out, int index, const float4& sum,
                                               const float2& total, float scale) {
    float factor = total.y > 0.0f ? scale / total.y : __int_as_float(0x7fffffff);
    if (total.x == minus_infinity()) factor = 0.0f;
    const float values[4] = {sum.x * factor, sum.y * factor, sum.z * factor, sum.w * factor};
    reinterpret_cast<Pack<T, 4>*>(out)[index] = rounded<T, 4>(values);
  }

  // `heads` rows of the result go to `out`, one behind the other.
  __device__ __forceinline__ void run(Warp& warp, T* out, int heads, float scale) {
    const int of_thread = threadIdx.x / 32;
    warp.store(totals[of_thread], reinterpret_cast<float*>(of_warp[of_thread]), Warp::kDim);
    __syncthreads();
    const int count = heads * kRow;
    if constexpr (kCluster == 1) {
      for (int i = threadIdx.x; i < count; i += kAttentionThreads) {
        const int head = i / kRow;
        const float2 total = joined<kAttentionWarps>(&totals[0][head], kHeads);
        store(out, i,
              joined<kAttentionWarps>(&totals[0][head], kHeads, total.x, &of_warp[0][0][i], kAll),
              total, scale);
      }
    } else {
      const unsigned rank = cluster_rank();
      const int share = (count + kCluster - 1) / kCluster;
      cluster_wait();
      for (int i = threadIdx.x; i < kHeads * kCluster; i += kAttentionThreads) {
        const int head = i % kHeads;
        send(joined<kAttentionWarps>(&totals[0][head], kHeads), &inbox_totals[rank][head],
             i / kHeads);
      }
      for (int i = threadIdx.x; i < count; i += kAttentionThreads) {
        const int head = i / kRow;
        const float high = joined<kAttentionWarps>(&totals[0][head], kHeads).x;
        send(joined<kAttentionWarps>(&totals[0][head], kHeads, high, &of_warp[0][0][i], kAll),
             &inbox[rank][i % share], i / share);
      }
      cluster_barrier<kCluster>();
      const int first = rank * share;
      for (int i = threadIdx.x; i < share && first + i < count; i += kAttentionThreads) {
        const int head = (first + i) / kRow;
        const float2 total = joined<kCluster>(&inbox_totals[0][head], kHeads);
        store(out, first + i,
              joined<kCluster>(&inbox_totals[0][head], kHeads, total.x, &inbox[0][i], kShare),
              total, scale);
      }
    }
  }
};

}  // namespace fusedops
