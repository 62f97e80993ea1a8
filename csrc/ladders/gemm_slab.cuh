// Tiles of 128 rows of x and 128 rows of w, 64 bytes of each row at a time: a slab. Rows are padded
// to five vectors of 16 bytes, so that eight threads that read vectors of eight rows meet all
// banks.
#pragma once

namespace fusedops {

constexpr int kTile = 128;
constexpr int kVecs = 4;  // vectors of a row
constexpr int kThreads = 256;

template <class Vec>
struct Slab {
  Vec x[kTile][kVecs + 1];
  Vec w[kTile][kVecs + 1];
};

// Copies slab number `step` with `copy(to, from)`, two vectors of x and two of w a thread; four
// threads share a row. `vecs` counts the vectors of a row of x and w.
template <class Vec, class Copy>
__device__ __forceinline__ void fill_slab(Slab<Vec>& slab, const Vec* x, const Vec* w, int vecs,
                                          int step, const Copy& copy) {
  const int q = threadIdx.x % kVecs;
  const int row = threadIdx.x / kVecs;
  x += (1ll * blockIdx.y * kTile + row) * vecs + step * kVecs + q;
  w += (1ll * blockIdx.x * kTile + row) * vecs + step * kVecs + q;
#pragma unroll
  for (int below = 0; below < kTile; below += kThreads / kVecs) {
    copy(&slab.x[row + below][q], x + below * vecs);
    copy(&slab.w[row + below][q], w + below * vecs);
  }
}

}  // namespace fusedops
