// 16-byte vectors: the widest load and store that every supported architecture has.
#pragma once

namespace fusedops {

constexpr int kVecBytes = 16;

template <typename T>
constexpr int kVecWidth = kVecBytes / static_cast<int>(sizeof(T));

template <typename T>
struct alignas(kVecBytes) Vec {
  T data[kVecWidth<T>];
};

// Whether vectors may be read and written at this address: a view can begin at any element.
__device__ __forceinline__ bool is_vec_aligned(const void* address) {
  return reinterpret_cast<unsigned long long>(address) % kVecBytes == 0;
}

// Vector number `index` of an aligned array.
template <typename T>
__device__ __forceinline__ Vec<T> load_vec(const T* base, long long index) {
  return reinterpret_cast<const Vec<T>*>(base)[index];
}

template <typename T>
__device__ __forceinline__ void store_vec(T* base, long long index, const Vec<T>& value) {
  reinterpret_cast<Vec<T>*>(base)[index] = value;
}

}  // namespace fusedops
