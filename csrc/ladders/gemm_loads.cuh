// The loads of a product from global memory, all through here so that they can be counted: with
// COUNT_LOADS defined, `loaded_values` counts matrix elements and `take_loads` hands the count out.
#pragma once

namespace fusedops {

#ifdef COUNT_LOADS
__device__ unsigned long long loaded_values;

__global__ void take_loads(unsigned long long* out) { *out = atomicExch(&loaded_values, 0ull); }

__device__ __forceinline__ void count_loads(int values) {
  atomicAdd(&loaded_values, static_cast<unsigned long long>(values));
}
#else
__device__ __forceinline__ void count_loads(int) {}
#endif

template <class Value>
__device__ __forceinline__ Value load(const Value* from) {
  count_loads(sizeof(Value) / sizeof(float));
  return *from;
}

}  // namespace fusedops
