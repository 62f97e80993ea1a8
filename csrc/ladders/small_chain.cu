// Idea: N small kernels, each reading what the one ahead wrote: launched one by one, from a graph,
//   with programmatic dependent launch, and as one kernel that does the work of all.
// Wall: launch. Eager launches cost the host's microseconds each; a graph leaves the gap between
//   two kernels; dependent launch hides a part of it by starting a kernel before the last one ends.
// Lever: a graph where the sequence is fixed, dependent launch within it, and fusion, which leaves
//   one launch and keeps the values in registers.

#include "pdl.cuh"

namespace fusedops {

__global__ void __launch_bounds__(256) small_chain(float* x, int rounds, int count) {
  // The next kernel may take its place now; its own wait keeps it from reading too early.
  pdl_launch_dependents();
  pdl_wait();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  float value = x[i];
  for (int round = 0; round < rounds; ++round) value = fmaf(value, 0.5f, 1.0f);
  x[i] = value;
}

}  // namespace fusedops
