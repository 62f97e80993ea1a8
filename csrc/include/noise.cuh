// Gumbel noise that depends on a seed and an index alone: SplitMix64's finaliser over a counter
// (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014).
#pragma once

namespace fusedops {

constexpr unsigned long long kGoldenGamma = 0x9e3779b97f4a7c15ull;
// Distance of the seeds of neighbouring rows under one shared seed.
constexpr unsigned long long kRowGamma = 0xd1b54a32d192ed03ull;

// How far Noise::approximate may be from Noise::exact, with room: 2e-5 is the most.
constexpr float kNoiseSlack = 1.0f / 1024;

__device__ __forceinline__ unsigned long long mix(unsigned long long z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

struct Noise {
  unsigned long long key;

  __device__ __forceinline__ explicit Noise(unsigned long long seed)
      : key(mix(seed + kGoldenGamma)) {}

  __device__ __forceinline__ unsigned bits(unsigned index) const {
    return static_cast<unsigned>(mix(key + (index + 1ull) * kGoldenGamma) >> 32);
  }

  // -log(-log(u)) of a uniform 32-bit fraction, in float64: in float32 a fraction this close to 1
  // would round to 1, whose noise is infinite.
  static __device__ __forceinline__ float exact(unsigned bits) {
    const double uniform = (static_cast<double>(bits) + 0.5) * 0x1p-32;
    return static_cast<float>(-log(-log(uniform)));
  }

  // The same for a hundredth of the time, to tell who cannot be the largest. Near u = 1, where the
  // largest noise comes from, -log(u) is a series in 1 - u, which integers give exactly.
  static __device__ __forceinline__ float approximate(unsigned bits) {
    const float rest = (static_cast<float>(~bits) + 0.5f) * 0x1p-32f;
    float exponential;
    if (rest < 0.25f) {
      float sum = 1.0f / 7.0f;
      sum = fmaf(sum, rest, 1.0f / 6.0f);
      sum = fmaf(sum, rest, 1.0f / 5.0f);
      sum = fmaf(sum, rest, 1.0f / 4.0f);
      sum = fmaf(sum, rest, 1.0f / 3.0f);
      sum = fmaf(sum, rest, 1.0f / 2.0f);
      exponential = fmaf(sum * rest, rest, rest);
    } else {
      exponential = -__logf((static_cast<float>(bits) + 0.5f) * 0x1p-32f);
    }
    return -__logf(exponential);
  }
};

}  // namespace fusedops
