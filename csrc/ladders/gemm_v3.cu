// Idea: rows of the tiles padded by one vector of four words: eight threads that read vectors of
//   eight rows meet all 32 banks, and the loads stay 16 bytes wide.
// Wall: load units. Every four multiply-adds still take two loads from shared memory, of which
//   w's moves 512 bytes for the warp: four turns.
// Lever: keep several rows and columns in the registers of a thread, so that each value loaded
//   serves several multiply-adds.

#include "gemm_tiles.cuh"

namespace fusedops {

constexpr int kTile = 32;

__global__ void __launch_bounds__(kTile* kTile)
    gemm_v3(const float* x, const float* w, float* out, int n, int k) {
  multiply_tiles<kTile, kTile + 4>(x, w, out, n, k);
}

}  // namespace fusedops
