// Idea: no copy engine. A thread reads a square of 4 x 4, 16 bytes an access, turns it in registers
//   and passes it once through shared memory, whose rows are padded by one vector.
// Wall: memory, at 96 % (130 us on an H200). What is left to see are bank conflicts: eight threads
//   that store together are four rows apart, two places only with a pitch of 17 vectors, so that a
//   store takes four times its turns.
// Lever: permute the vectors of a row instead of padding it.

#include "square.cuh"

namespace fusedops {

constexpr int kTile = 64;
constexpr int kVecs = kTile / 4;  // vectors in a row of the tile

// Blocks of 256 threads; rows and columns are multiples of 64.
__global__ void __launch_bounds__(256)
    transpose_v7(const float4* x, float4* out, int rows, int columns) {
  __shared__ float4 tile[kTile][kVecs + 1];
  const int r = threadIdx.x / kVecs;  // the square's place in the tile
  const int c = threadIdx.x % kVecs;
  Square square;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const long long row = blockIdx.x * kTile + 4 * r + k;
    square.row[k] = x[row * (columns / 4) + blockIdx.y * kVecs + c];
  }
#pragma unroll
  for (int k = 0; k < 4; ++k) tile[4 * c + k][r] = column_of(square, k);
  __syncthreads();
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const int row = kVecs * k + r;
    const long long out_row = blockIdx.y * kTile + row;
    out[out_row * (rows / 4) + blockIdx.x * kVecs + c] = tile[row][c];
  }
}

}  // namespace fusedops
