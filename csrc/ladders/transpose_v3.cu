// Idea: a block takes a tile of 32 x 32 through shared memory; rows are read and rows are
//   written.
// Wall: bank conflicts. A warp reads a column of the tile, whose elements lie 32 words apart:
//   all in one bank. The compiler joins the four reads of a thread into one of 16 bytes, and
//   each of those takes 32 turns.
// Lever: shift every row by one word, so that a column touches all banks.

namespace fusedops {

constexpr int kTile = 32;
constexpr int kRowsPerThread = 4;

// Blocks of (32, 8) threads; rows and columns are multiples of 32.
__global__ void transpose_v3(const float* x, float* out, int rows, int columns) {
  __shared__ float tile[kTile][kTile];
  const int first_row = blockIdx.y * kTile;
  const int first_column = blockIdx.x * kTile;
  const int part = threadIdx.y * kRowsPerThread;
#pragma unroll
  for (int j = 0; j < kRowsPerThread; ++j) {
    const long long row = first_row + part + j;
    tile[part + j][threadIdx.x] = x[row * columns + first_column + threadIdx.x];
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kRowsPerThread; ++j) {
    const long long row = first_column + part + j;
    out[row * rows + first_row + threadIdx.x] = tile[threadIdx.x][part + j];
  }
}

}  // namespace fusedops
