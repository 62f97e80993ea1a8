// Tiles of 64 x 64 floats by bulk tensor copies, from sm_90 on (PTX ISA, "cp.async.bulk.tensor" and
// "mbarrier"). A tile lies in shared memory as two halves of 32 columns: rows of 128 bytes, whose
// eight vectors the copy engine permutes (swizzle 128B: vector q of a row stands at q XOR row % 8).
#pragma once

#include "square.cuh"

namespace fusedops {

constexpr int kTile = 64;
constexpr int kHalf = 32;
constexpr int kTileBytes = kTile * kTile * 4;
constexpr int kThreads = 256;

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// A barrier that one thread arrives at, with the bytes that are to come.
__device__ __forceinline__ void init_barrier(unsigned long long* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}

// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// The map was written by an ordinary copy; the copy engine must see that.
__device__ __forceinline__ void acquire_map(const void* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}

// Asks for the tile that begins at (row, column); the barrier completes when it has come.
__device__ __forceinline__ void load_tile(const void* map, float4* tile,
                                          unsigned long long* barrier, int row, int column) {
  const unsigned bar = shared_address(barrier);
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(kTileBytes)
               : "memory");
#pragma unroll
  for (int half = 0; half < kTile / kHalf; ++half) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(tile) + half * kTileBytes / 2),
        "l"(map), "r"(column + half * kHalf), "r"(row), "r"(bar)
        : "memory");
  }
}

__device__ __forceinline__ void wait_barrier(unsigned long long* barrier, unsigned parity) {
  unsigned done = 0;
  while (done == 0) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  }
}

// Writes the turned tile. Of eight threads that read together, each takes another vector place; a
// warp writes four rows of 128 bytes at a time.
__device__ __forceinline__ void store_turned(const float4* tile, float4* out, int row, int column,
                                             int rows) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int r = (lane & 1) | (lane >> 3 << 1) | (warp & 1) << 3;  // the square's place in the tile
  const int q = ((lane >> 1) & 3) | (warp & 2) << 1;
  const int half = warp >> 2;
  Square square;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const int tile_row = 4 * r + k;
    square.row[k] = tile[half * (kTileBytes / 32) + tile_row * 8 + (q ^ (tile_row & 7))];
  }
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const long long out_row = column + half * kHalf + 4 * q + k;
    out[out_row * (rows / 4) + row / 4 + r] = column_of(square, k);
  }
}

}  // namespace fusedops
