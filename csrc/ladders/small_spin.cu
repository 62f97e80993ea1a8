// Idea: a kernel of a known length, timed by a host clock without waiting, by a host clock that
//   waits, by a pair of events, and by events around many launches.
// Wall: launch. A launch returns before the kernel runs, so a clock that does not wait times the
//   queue; one that waits adds the launch, the way back and the host's own noise to every call.
// Lever: events on the GPU, around enough work that their own few microseconds do not count, and
//   a graph, so that the host is not in between.

namespace fusedops {

__global__ void small_spin(long long* out, long long cycles) {
  const long long start = clock64();
  long long elapsed = 0;
  while (elapsed < cycles) elapsed = clock64() - start;
  if (threadIdx.x == 0 && blockIdx.x == 0) *out = elapsed;
}

}  // namespace fusedops
