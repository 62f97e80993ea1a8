// Idea: a tree in shared memory with interleaved addresses; in each round every second of the
//   threads that are left adds its neighbour's sum.
// Wall: load units. The working threads are spread over all warps. That is divergence, which the
//   compiler turns into predicates: every warp issues the loads of all eight rounds, for ever fewer
//   of its lanes, and the modulo is dear.
// Lever: let the first threads work, whatever they add.

namespace fusedops {

constexpr int kThreads = 256;

// One element a thread; partial[block] is the block's sum. Launched again on the partial sums until
// one is left.
__global__ void reduce_v1(const float* x, float* partial, long long count) {
  __shared__ float held[kThreads];
  const int t = threadIdx.x;
  const long long i = static_cast<long long>(blockIdx.x) * kThreads + t;
  held[t] = i < count ? x[i] : 0.0f;
  __syncthreads();
  for (int distance = 1; distance < kThreads; distance *= 2) {
    if (t % (2 * distance) == 0) held[t] += held[t + distance];
    __syncthreads();
  }
  if (t == 0) partial[blockIdx.x] = held[0];
}

}  // namespace fusedops
