// Idea: sequential addresses: thread t adds the element half the rest away; lanes touch
//   neighbouring banks.
// Wall: load units. Half of the threads only load and never add, and warps at rest still issue
//   their predicated loads of eight rounds and wait at eight barriers, for 256 elements.
// Lever: add during the load.

namespace fusedops {

constexpr int kThreads = 256;

// One element a thread; partial sums as in reduce_v1.
__global__ void reduce_v3(const float* x, float* partial, long long count) {
  __shared__ float held[kThreads];
  const int t = threadIdx.x;
  const long long i = static_cast<long long>(blockIdx.x) * kThreads + t;
  held[t] = i < count ? x[i] : 0.0f;
  __syncthreads();
  for (int distance = kThreads / 2; distance > 0; distance /= 2) {
    if (t < distance) held[t] += held[t + distance];
    __syncthreads();
  }
  if (t == 0) partial[blockIdx.x] = held[0];
}

}  // namespace fusedops
