// A square of 4 x 4 floats in the registers of one thread.
#pragma once

namespace fusedops {

struct Square {
  float4 row[4];
};

// Column `k` of the square; `k` must be known at compile time, else it leaves the registers.
__device__ __forceinline__ float4 column_of(const Square& square, int k) {
  const auto pick = [k](const float4& row) {
    return k == 0 ? row.x : k == 1 ? row.y : k == 2 ? row.z : row.w;
  };
  return make_float4(pick(square.row[0]), pick(square.row[1]), pick(square.row[2]),
                     pick(square.row[3]));
}

}  // namespace fusedops
