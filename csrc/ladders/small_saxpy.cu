// Idea: threads stride over the whole grid, so that a grid of the GPU's size serves any length, and
//   each moves 16 bytes an access instead of 4. What is left over, and pointers that 16 bytes do
//   not divide, go element by element.
// Wall: memory. 12 bytes an element for one multiply-add; short vectors stand at the launch.
// Lever: wide accesses need fewer instructions for the same bytes under way. Beyond that only
//   fusion helps, which keeps a vector from being moved at all.

namespace fusedops {

__global__ void __launch_bounds__(256)
    small_saxpy_scalar(const float* x, const float* y, float* out, float a, long long count) {
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i < count; i += step) out[i] = fmaf(a, x[i], y[i]);
}

__global__ void __launch_bounds__(256)
    small_saxpy_vector(const float* x, const float* y, float* out, float a, long long count) {
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  const long long first = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  const auto address = reinterpret_cast<unsigned long long>(x) |
                       reinterpret_cast<unsigned long long>(y) |
                       reinterpret_cast<unsigned long long>(out);
  // A wide access to an address that is no multiple of its size is an error, not a slow access.
  const long long vectors = address % sizeof(float4) == 0 ? count / 4 : 0;
  const auto* xs = reinterpret_cast<const float4*>(x);
  const auto* ys = reinterpret_cast<const float4*>(y);
  for (long long i = first; i < vectors; i += step) {
    const float4 u = xs[i], v = ys[i];
    reinterpret_cast<float4*>(out)[i] =
        make_float4(fmaf(a, u.x, v.x), fmaf(a, u.y, v.y), fmaf(a, u.z, v.z), fmaf(a, u.w, v.w));
  }
  for (long long i = 4 * vectors + first; i < count; i += step) out[i] = fmaf(a, x[i], y[i]);
}

}  // namespace fusedops
