// Idea: each thread adds two elements while it loads, so half as many blocks run the tree.
// Wall: load units. The tree's loads from shared memory are still more than those of the input.
// Lever: more elements a thread.

namespace fusedops {

constexpr int kThreads = 256;

// Two elements a thread; partial sums as in reduce_v1.
__global__ void reduce_v4(const float* x, float* partial, long long count) {
  __shared__ float held[kThreads];
  const int t = threadIdx.x;
  const long long i = static_cast<long long>(blockIdx.x) * 2 * kThreads + t;
  held[t] = (i < count ? x[i] : 0.0f) + (i + kThreads < count ? x[i + kThreads] : 0.0f);
  __syncthreads();
  for (int distance = kThreads / 2; distance > 0; distance /= 2) {
    if (t < distance) held[t] += held[t + distance];
    __syncthreads();
  }
  if (t == 0) partial[blockIdx.x] = held[0];
}

}  // namespace fusedops
