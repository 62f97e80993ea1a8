// The shared memory of a cluster's blocks. With one block a cluster it is the block's own, so that
// architectures without clusters run the same code.
#pragma once

#include "ptx.cuh"

namespace fusedops {

// All threads of the cluster's blocks meet; what they wrote to shared memory before is visible.
template <int kBlocks>
__device__ __forceinline__ void cluster_barrier() {
  if constexpr (kBlocks == 1) {
    __syncthreads();
  } else {
    cluster_arrive();
    cluster_wait();
  }
}

template <int kBlocks>
__device__ __forceinline__ unsigned rank_in_cluster() {
  if constexpr (kBlocks == 1) return 0;
  return cluster_rank();
}

// Reads 8 bytes from where `local` lies in the shared memory of the cluster's block `rank`.
template <int kBlocks>
__device__ __forceinline__ uint2 load_remote(const uint2* local, unsigned rank) {
  if constexpr (kBlocks == 1) return *local;
  uint2 value = make_uint2(0, 0);
#if __CUDA_ARCH__ >= 900
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(local));
  unsigned remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  asm volatile("ld.shared::cluster.v2.u32 {%0, %1}, [%2];"
               : "=r"(value.x), "=r"(value.y)
               : "r"(remote)
               : "memory");
#endif
  return value;
}

}  // namespace fusedops
