// Idea: the threads of a warp touch every n-th element, as columns of a matrix or fields of a
//   structure are touched.
// Wall: excess sectors. Memory moves in sectors of 32 bytes: from stride 8 on each of them brings
//   one useful float of eight, and a warp's request takes 32 sectors instead of 4.
// Lever: turn the loop round, store a structure of arrays, or turn tiles in shared memory.

namespace fusedops {

__global__ void __launch_bounds__(256)
    small_strided_read(const float* x, float* out, int stride, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) out[i] = x[static_cast<long long>(i) * stride];
}

__global__ void __launch_bounds__(256)
    small_strided_write(const float* x, float* out, int stride, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) out[static_cast<long long>(i) * stride] = x[i];
}

}  // namespace fusedops
