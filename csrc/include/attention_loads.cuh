// What warps that attend share: loads of a cache's elements at any alignment, words that earlier
// kernels may still change, 8-bit codes made floats, and the bounds of a running maximum.
#pragma once

#include <cuda_fp8.h>

#include "memory.cuh"
#include "pack.cuh"

namespace fusedops {

constexpr float kLeastScore = -3.402823466e+38f;

// A running maximum is raised only by a score this far (as a power of two) above it: few units have
// one, and the others are spared the search for it and the sums' correction.
constexpr float kSlack = 7.0f;

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

// Where a unit's keys begin in a cache, and how far its slots lie apart, in bytes.
struct Rows {
  const char* base;
  long long slot;
};

// The largest vector that divides what a lane takes of a row.
__host__ __device__ constexpr int vector_bytes(int bytes) {
  return bytes % 16 == 0 ? 16 : bytes % 8 == 0 ? 8 : 4;
}

// kBytes (4, 8 or 16) that begin at a multiple of kAlign bytes, past the L1 where they are whole.
template <int kBytes, int kAlign>
__device__ __forceinline__ void load_raw(const char* address, unsigned* words) {
  if constexpr (kAlign < kBytes && kAlign >= 4) {
#pragma unroll
    for (int i = 0; i < kBytes; i += kAlign) {
      load_raw<kAlign, kAlign>(address + i, words + i / 4);
    }
  } else if constexpr (kAlign < 4) {
    using Piece = Pack<unsigned char, kAlign>;
#pragma unroll
    for (int word = 0; word < kBytes / 4; ++word) {
      unsigned value = 0;
#pragma unroll
      for (int i = 0; i < 4; i += kAlign) {
        const Piece piece = *reinterpret_cast<const Piece*>(address + 4 * word + i);
#pragma unroll
        for (int j = 0; j < kAlign; ++j) value |= unsigned{piece.data[j]} << 8 * (i + j);
      }
      words[word] = value;
    }
  } else if constexpr (kBytes == 16) {
    const uint4 value = load_stream(address);
    words[0] = value.x;
    words[1] = value.y;
    words[2] = value.z;
    words[3] = value.w;
  } else if constexpr (kBytes == 8) {
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                 : "=r"(words[0]), "=r"(words[1])
                 : "l"(address));
  } else {
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(words[0]) : "l"(address));
  }
}

// A word from the L2, where every write that happened is seen; it may still change.
__device__ __forceinline__ int load_coherent(const int* address) {
  int value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// Asks for kBytes (a multiple of 16, aligned to 16) to be brought into the L2. Whatever happens to
// them meanwhile happens in the L2, too, so that it is safe at any time.
template <int kBytes>
__device__ __forceinline__ void prefetch_to_l2(const char* address) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "n"(kBytes) : "memory");
#endif
}

// Four codes as two words of two 16-bit floats each, exactly and in order.
template <typename Code, typename T>
struct Codes;

template <>
struct Codes<__nv_fp8_e4m3, __half> {
  static __device__ __forceinline__ unsigned pair(unsigned codes) {
    const __half2_raw values =
        __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(codes), __NV_E4M3);
    return same_bits<unsigned>(__half2(values));
  }
  static __device__ __forceinline__ void widen(unsigned codes, unsigned (&words)[2]) {
    words[0] = pair(codes & 0xffffu);
    words[1] = pair(codes >> 16);
  }
};

template <>
struct Codes<__nv_fp8_e4m3, __nv_bfloat16> {
  static __device__ __forceinline__ void widen(unsigned codes, unsigned (&words)[2]) {
    Codes<__nv_fp8_e4m3, __half>::widen(codes, words);
#pragma unroll
    for (unsigned& word : words) {
      const float2 values = PairOf<__half>::widened(pair_of<__half>(word));
      word = same_bits<unsigned>(PairOf<__nv_bfloat16>::rounded(values.x, values.y));
    }
  }
};

template <>
struct Codes<signed char, __half> {
  static __device__ __forceinline__ void widen(unsigned codes, unsigned (&words)[2]) {
    // 0x6400 is 1024, whose last bit counts 1: behind it a byte b makes 1024 + b.
    const unsigned shifted = codes ^ 0x80808080u;         // code + 128, without a sign
    const __half2 offset = pair_of<__half>(0x64806480u);  // 1024 + 128
    words[0] = same_bits<unsigned>(
        __hsub2(pair_of<__half>(__byte_perm(shifted, 0x64646464u, 0x4140)), offset));
    words[1] = same_bits<unsigned>(
        __hsub2(pair_of<__half>(__byte_perm(shifted, 0x64646464u, 0x4342)), offset));
  }
};

template <>
struct Codes<signed char, __nv_bfloat16> {
  static __device__ __forceinline__ unsigned difference(unsigned word) {
    // 0x4300 is 128, whose last bit counts 1, and 0x4380 is 256: the seven low bits of a code make
    // 128 + bits, its sign alone 128 or 256, and the difference is the code.
    return same_bits<unsigned>(__hsub2(pair_of<__nv_bfloat16>(word & 0xff7fff7fu),
                                       pair_of<__nv_bfloat16>(word & 0xff80ff80u)));
  }
  static __device__ __forceinline__ void widen(unsigned codes, unsigned (&words)[2]) {
    words[0] = difference(__byte_perm(codes, 0x43434343u, 0x4140));
    words[1] = difference(__byte_perm(codes, 0x43434343u, 0x4342));
  }
};

// One code, or an element that is no code, as a float.
__device__ __forceinline__ float code_to_float(__nv_fp8_e4m3, unsigned byte) {
  const __half value(__nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(byte), __NV_E4M3));
  return to_float(value);
}
__device__ __forceinline__ float code_to_float(signed char, unsigned byte) {
  return static_cast<float>(static_cast<signed char>(byte));
}

}  // namespace fusedops
