// out[i] = x[i] * factor in float, rounded once: a small kernel of the usual shape, by which
// `fusedops doctor` and the tests see whether compiling, loading and launching work.

#include "convert.cuh"
#include "pdl.cuh"
#include "vec.cuh"

namespace fusedops {

template <typename T>
__global__ void scale(const T* x, T* out, float factor, long long count) {
  pdl_launch_dependents();
  pdl_wait();
  const long long thread = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  const long long threads = static_cast<long long>(gridDim.x) * blockDim.x;
  long long done = 0;
  if (is_vec_aligned(x) && is_vec_aligned(out)) {
    const long long vectors = count / kVecWidth<T>;
    for (long long i = thread; i < vectors; i += threads) {
      Vec<T> value = load_vec(x, i);
#pragma unroll
      for (int j = 0; j < kVecWidth<T>; ++j) {
        value.data[j] = from_float<T>(to_float(value.data[j]) * factor);
      }
      store_vec(out, i, value);
    }
    done = vectors * kVecWidth<T>;
  }
  for (long long i = done + thread; i < count; i += threads) {
    out[i] = from_float<T>(to_float(x[i]) * factor);
  }
}

}  // namespace fusedops
