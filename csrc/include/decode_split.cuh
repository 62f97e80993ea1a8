// Who attends which keys of a request in a decode step. Keys are dealt out in units of 16 that
// begin at multiples of 16, so that a unit lies in one page of 16, 32, ... slots. The parts of a
// request are the warps of its cluster, numbered with the block's rank changing first; part p takes
// the units p, p + parts, p + 2 parts, ... from the first visible one on. So shares differ by at
// most one unit whatever the length, and where a part's keys lie does not depend on what the others
// do.
#pragma once

namespace fusedops {

constexpr int kUnit = 16;

struct Share {
  int low;    // the first visible position
  int high;   // behind the last one that is visible and stored
  int first;  // unit of this part's first keys
  int count;  // its units

  __host__ __device__ constexpr int unit(int k, int parts) const { return first + k * parts; }
};

// The share of one part. window 0: none; capacity: positions that the block table has room for.
__host__ __device__ constexpr Share share_of(int length, int window, int capacity, int part,
                                             int parts) {
  const int high = length < capacity ? length : capacity;
  // The window ends at the query's own position, which may lie beyond the table.
  const int low = window > 0 && length > window ? length - window : 0;
  const int first = low / kUnit + part;
  const int units = high > low ? (high - 1) / kUnit + 1 : 0;
  return {low, high, first, units > first ? (units - first - 1) / parts + 1 : 0};
}

}  // namespace fusedops
