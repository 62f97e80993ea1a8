// Idea: the same tree by the first threads of the block, so whole warps work or rest.
// Wall: bank conflicts. Thread t adds the words 2 d t and 2 d t + d: with the distance d the
//   stride between lanes grows, and up to 32 of them meet in one bank.
// Lever: sequential addresses.

namespace fusedops {

constexpr int kThreads = 256;

// One element a thread; partial sums as in reduce_v1.
__global__ void reduce_v2(const float* x, float* partial, long long count) {
  __shared__ float held[kThreads];
  const int t = threadIdx.x;
  const long long i = static_cast<long long>(blockIdx.x) * kThreads + t;
  held[t] = i < count ? x[i] : 0.0f;
  __syncthreads();
  for (int distance = 1; distance < kThreads; distance *= 2) {
    const int place = 2 * distance * t;
    if (place < kThreads) held[place] += held[place + distance];
    __syncthreads();
  }
  if (t == 0) partial[blockIdx.x] = held[0];
}

}  // namespace fusedops
