// Idea: one block turns one row; each of its threads takes a slice of neighbouring columns.
// Wall: excess sectors. At any moment the lanes of a warp read 32 addresses that lie a slice
//   apart and write 32 addresses that lie rows apart. Each access moves a sector of 32 bytes
//   for 4 bytes.
// Lever: give neighbouring threads neighbouring columns.

namespace fusedops {

__global__ void transpose_v1(const float* x, float* out, int rows, int columns) {
  const long long row = blockIdx.x;
  const int slice = (columns + blockDim.x - 1) / blockDim.x;
  const int first = threadIdx.x * slice;
  const int last = min(first + slice, columns);
  for (int column = first; column < last; ++column) {
    out[static_cast<long long>(column) * rows + row] = x[row * columns + column];
  }
}

}  // namespace fusedops
