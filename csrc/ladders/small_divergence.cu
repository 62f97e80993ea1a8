// Idea: every thread takes one of several paths of the same length. Chosen by lane, the threads of
//   a warp part; chosen by warp, each warp stays together.
// Wall: divergence. A warp runs the paths that its threads take one after the other, so n paths
//   within a warp cost n times one; n paths over n warps cost nothing.
// Lever: arrange data or work so that neighbours agree: sort, compact, or branch on the warp.

namespace fusedops {

__global__ void __launch_bounds__(256)
    small_divergence(const float* x, float* out, int paths, int by_warp, int rounds, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const int mine = (by_warp ? i / 32 : i) % paths;
  float value = x[i];
  for (int path = 0; path < paths; ++path) {
    if (path == mine) {
      const float factor = 0.5f + path / 128.0f;
      for (int round = 0; round < rounds; ++round) value = fmaf(value, factor, 0.25f);
    }
  }
  out[i] = value;
}

}  // namespace fusedops
