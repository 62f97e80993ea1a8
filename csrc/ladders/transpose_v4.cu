// Idea: rows of the tile are padded by one word, so the elements of a column lie in 32 banks.
// Wall: memory, at 85 % of its ceiling (H200). Sectors and banks are clean, but every thread moves
//   4 bytes an instruction and has four loads under way.
// Lever: move more bytes an instruction; the copy engine moves a whole tile by one.

namespace fusedops {

constexpr int kTile = 32;
constexpr int kRowsPerThread = 4;

// Blocks of (32, 8) threads; rows and columns are multiples of 32.
__global__ void transpose_v4(const float* x, float* out, int rows, int columns) {
  __shared__ float tile[kTile][kTile + 1];
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
