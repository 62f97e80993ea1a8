// Positions of strided tensors.
#pragma once

namespace fusedops {

constexpr int kMaxDims = 4;

// Sizes and strides (in elements) of up to kMaxDims dimensions, the last one innermost. The first
// size is never looked at.
struct Dims {
  long long size[kMaxDims];
  long long stride[kMaxDims];

  // Distance in elements of position `index` in row-major order from the first one. Index is
  // unsigned or unsigned long long; a division of the second takes four times as long.
  template <typename Index>
  __device__ __forceinline__ long long offset(Index index) const {
    constexpr int kInner = kMaxDims - 1;
    // All there is where a tensor has one dimension.
    if (index < static_cast<Index>(size[kInner])) {
      return static_cast<long long>(index) * stride[kInner];
    }
    long long sum = 0;
#pragma unroll
    for (int d = kInner; d > 0; --d) {
      const Index length = static_cast<Index>(size[d]);
      const Index quotient = index < length ? 0 : index / length;
      sum += static_cast<long long>(index - quotient * length) * stride[d];
      index = quotient;
    }
    return sum + static_cast<long long>(index) * stride[0];
  }
};

}  // namespace fusedops
