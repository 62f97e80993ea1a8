// What reductions compute: one struct an operation, of which the kernels in reduce.cu know nothing
// but this interface. T is the element type of the input.
//
//   Acc                what is accumulated; merge(a, b) joins two of them, empty() is neutral.
//   pad()              an element that changes no result, where a vector is not full.
//   fold(values)       kCount elements into one Acc, as a tree: errors grow with its depth, and
//                      additions do not wait for one another.
//   locate(acc, ...)   positions: those of fold count from 0, these from the start of the input.
//   finish(acc, n)     the result of n elements, rounded once.
#pragma once

#include "convert.cuh"
#include "ptx.cuh"

namespace fusedops {

template <typename T>
constexpr bool kIsFloat = false;
template <>
inline constexpr bool kIsFloat<float> = true;
template <>
inline constexpr bool kIsFloat<double> = true;
template <>
inline constexpr bool kIsFloat<__half> = true;
template <>
inline constexpr bool kIsFloat<__nv_bfloat16> = true;

// The type to compare in: floats of up to 32 bits as float, integers of up to 32 bits as int.
template <typename T>
struct WideOf {
  using type = int;
};
template <>
struct WideOf<long long> {
  using type = long long;
};
template <>
struct WideOf<float> {
  using type = float;
};
template <>
struct WideOf<__half> {
  using type = float;
};
template <>
struct WideOf<__nv_bfloat16> {
  using type = float;
};
template <>
struct WideOf<double> {
  using type = double;
};
template <typename T>
using Wide = typename WideOf<T>::type;

// The type to add in: float, double, or 64-bit integers.
template <typename T>
struct TotalOf {
  using type = long long;
};
template <>
struct TotalOf<float> {
  using type = float;
};
template <>
struct TotalOf<__half> {
  using type = float;
};
template <>
struct TotalOf<__nv_bfloat16> {
  using type = float;
};
template <>
struct TotalOf<double> {
  using type = double;
};
template <typename T>
using Total = typename TotalOf<T>::type;

template <bool kCondition, typename A, typename B>
struct SelectOf {
  using type = A;
};
template <typename A, typename B>
struct SelectOf<false, A, B> {
  using type = B;
};
// A for floats, B for integers.
template <typename T, typename A, typename B>
using ByKind = typename SelectOf<kIsFloat<T>, A, B>::type;

template <typename To, typename T>
__device__ __forceinline__ To widen(T value) {
  if constexpr (sizeof(T) == 2 && kIsFloat<T>) {
    return to_float(value);
  } else {
    return static_cast<To>(value);
  }
}

template <typename T, typename From>
__device__ __forceinline__ T narrow(From value) {
  if constexpr (sizeof(T) == 2 && kIsFloat<T>) {
    return from_float<T>(value);
  } else {
    return static_cast<T>(value);
  }
}

template <typename T>
__device__ __forceinline__ T infinity() {
  if constexpr (sizeof(T) == 8) {
    return __longlong_as_double(0x7ff0000000000000ll);
  } else {
    return narrow<T>(__int_as_float(0x7f800000));
  }
}

// The end of T's range: -infinity and infinity for floats.
template <typename T>
__device__ __forceinline__ T lowest() {
  if constexpr (kIsFloat<T>) {
    return -infinity<T>();
  } else {
    // Unsigned types and bool have nothing below 0.
    return static_cast<T>(-1) > static_cast<T>(0) ? T(0)
                                                  : static_cast<T>(1ull << (8 * sizeof(T) - 1));
  }
}

template <typename T>
__device__ __forceinline__ T highest() {
  if constexpr (kIsFloat<T>) {
    return infinity<T>();
  } else {
    return static_cast<T>(-1) > static_cast<T>(0)
               ? static_cast<T>(-1)
               : static_cast<T>((1ull << (8 * sizeof(T) - 1)) - 1);
  }
}

__device__ __forceinline__ double max_nan(double a, double b) { return a != a || a > b ? a : b; }
__device__ __forceinline__ double min_nan(double a, double b) { return a != a || a < b ? a : b; }
__device__ __forceinline__ int max_nan(int a, int b) { return a > b ? a : b; }
__device__ __forceinline__ int min_nan(int a, int b) { return a < b ? a : b; }
__device__ __forceinline__ long long max_nan(long long a, long long b) { return a > b ? a : b; }
__device__ __forceinline__ long long min_nan(long long a, long long b) { return a < b ? a : b; }

// Operations whose elements become accumulators one by one (`Op::one`) and are merged as a tree.
template <typename Op, typename T, typename AccType>
struct Fold {
  using Acc = AccType;

  template <int kCount>
  static __device__ __forceinline__ Acc fold(const T (&values)[kCount]) {
    // A tree over all bytes of eight vectors would take 128 registers.
    constexpr int kTree = kCount < 32 ? kCount : 32;
    Acc result;
#pragma unroll
    for (int first = 0; first < kCount; first += kTree) {
      Acc tree[kTree];
#pragma unroll
      for (int i = 0; i < kTree; ++i) tree[i] = Op::one(values[first + i]);
#pragma unroll
      for (int step = 1; step < kTree; step *= 2) {
#pragma unroll
        for (int i = 0; i + step < kTree; i += 2 * step) {
          tree[i] = Op::merge(tree[i], tree[i + step]);
        }
      }
      result = first == 0 ? tree[0] : Op::merge(result, tree[0]);
    }
    return result;
  }

  // Elements that follow one another in groups of kRun, `step` apart, from position `first`.
  template <int kRun>
  static __device__ __forceinline__ Acc locate(Acc acc, long long first, long long step) {
    return acc;
  }
};

template <typename T>
struct Sum : Fold<Sum<T>, T, Total<T>> {
  using Acc = Total<T>;
  using Out = ByKind<T, T, long long>;
  static __device__ __forceinline__ Acc empty() { return 0; }
  static __device__ __forceinline__ T pad() { return narrow<T>(0.0f); }
  static __device__ __forceinline__ Acc one(T value) { return widen<Acc>(value); }
  static __device__ __forceinline__ Acc merge(Acc a, Acc b) { return a + b; }
  static __device__ __forceinline__ Out finish(Acc acc, long long) { return narrow<Out>(acc); }
};

template <typename T>
struct Mean : Sum<T> {
  using Acc = Total<T>;
  using Out = ByKind<T, T, float>;
  static __device__ __forceinline__ Out finish(Acc acc, long long count) {
    using Quotient = ByKind<T, Acc, double>;
    return narrow<Out>(static_cast<Quotient>(acc) / static_cast<Quotient>(count));
  }
};

template <typename T>
struct SumSq : Sum<T> {
  using Acc = Total<T>;
  static __device__ __forceinline__ Acc one(T value) {
    return widen<Acc>(value) * widen<Acc>(value);
  }
  template <int kCount>
  static __device__ __forceinline__ Acc fold(const T (&values)[kCount]) {
    return Fold<SumSq<T>, T, Acc>::fold(values);
  }
};

template <typename T>
struct Max : Fold<Max<T>, T, Wide<T>> {
  using Acc = Wide<T>;
  using Out = T;
  static __device__ __forceinline__ Acc empty() { return lowest<Acc>(); }
  static __device__ __forceinline__ T pad() { return lowest<T>(); }
  static __device__ __forceinline__ Acc one(T value) { return widen<Acc>(value); }
  static __device__ __forceinline__ Acc merge(Acc a, Acc b) { return max_nan(a, b); }
  static __device__ __forceinline__ T finish(Acc acc, long long) { return narrow<T>(acc); }
};

template <typename T>
struct Min : Fold<Min<T>, T, Wide<T>> {
  using Acc = Wide<T>;
  using Out = T;
  static __device__ __forceinline__ Acc empty() { return highest<Acc>(); }
  static __device__ __forceinline__ T pad() { return highest<T>(); }
  static __device__ __forceinline__ Acc one(T value) { return widen<Acc>(value); }
  static __device__ __forceinline__ Acc merge(Acc a, Acc b) { return min_nan(a, b); }
  static __device__ __forceinline__ T finish(Acc acc, long long) { return narrow<T>(acc); }
};

// The magnitude of the most negative integer counts as the largest one, which T holds.
template <typename T>
struct AbsMax : Fold<AbsMax<T>, T, Wide<T>> {
  using Acc = Wide<T>;
  using Out = T;
  static __device__ __forceinline__ Acc empty() { return 0; }
  static __device__ __forceinline__ T pad() { return narrow<T>(0.0f); }
  static __device__ __forceinline__ Acc one(T value) {
    const Acc wide = widen<Acc>(value);
    if constexpr (kIsFloat<T>) {
      return sizeof(T) == 8 ? fabs(wide) : fabsf(wide);
    } else {
      return wide >= 0 ? wide : value == lowest<T>() ? widen<Acc>(highest<T>()) : -wide;
    }
  }
  static __device__ __forceinline__ Acc merge(Acc a, Acc b) { return max_nan(a, b); }
  static __device__ __forceinline__ T finish(Acc acc, long long) { return narrow<T>(acc); }
};

// The first position of the extremum; a NaN is one, and the first NaN wins.
template <typename T>
struct Position {
  Wide<T> value;
  long long index;
};

template <typename T, bool kLargest>
struct Arg {
  using Acc = Position<T>;
  using Out = long long;
  using Extremum = typename SelectOf<kLargest, Max<T>, Min<T>>::type;
  static constexpr long long kNowhere = 0x7fffffffffffffffll;

  static __device__ __forceinline__ bool beats(Wide<T> a, Wide<T> b) {
    // Neither `a <= b` nor a NaN before: a is larger, or the first NaN.
    return (kLargest ? !(a <= b) : !(a >= b)) && b == b;
  }
  static __device__ __forceinline__ Acc empty() { return {Extremum::empty(), kNowhere}; }
  // Ties only where no element is better than it, and lies behind the first element.
  static __device__ __forceinline__ T pad() { return Extremum::pad(); }
  static __device__ __forceinline__ Acc merge(Acc a, Acc b) {
    const bool is_later = b.index > a.index;
    const Acc first = is_later ? a : b;
    const Acc second = is_later ? b : a;
    return beats(second.value, first.value) ? second : first;
  }
  // The place of the first match; there is one.
  template <int kCount, class Match>
  static __device__ __forceinline__ int first_place(const T (&values)[kCount], Match is_match) {
    int place = kCount - 1;
#pragma unroll
    for (int i = kCount - 2; i >= 0; --i)
      if (is_match(widen<Wide<T>>(values[i]))) place = i;
    return place;
  }
  // An instruction an element finds the extremum (float: FMNMX), two more its place (FSETP, SEL).
  // Following both from element to element takes four, each of which waits for those before it.
  template <int kCount>
  static __device__ __forceinline__ Acc fold(const T (&values)[kCount]) {
    const Wide<T> best = Extremum::fold(values);
    const int place = best == best
                          ? first_place(values, [best](Wide<T> value) { return value == best; })
                          : first_place(values, [](Wide<T> value) { return value != value; });
    return {best, place};
  }
  template <int kRun>
  static __device__ __forceinline__ Acc locate(Acc acc, long long first, long long step) {
    const int place = static_cast<int>(acc.index);
    return {acc.value, first + place / kRun * step + place % kRun};
  }
  static __device__ __forceinline__ Out finish(Acc acc, long long) { return acc.index; }
};

// log(sum(exp(x))) in one pass: the maximum so far, and the sum of exponentials relative to it.
template <typename A>
struct LogSum {
  A maximum;
  A sum;
};

template <typename T>
struct LogSumExp : Fold<LogSumExp<T>, T, LogSum<Wide<T>>> {
  using A = Wide<T>;
  using Acc = LogSum<A>;
  using Out = T;

  // What is subtracted: an infinite maximum is not, since inf - inf would be NaN.
  static __device__ __forceinline__ A anchor(A maximum) {
    return maximum == infinity<A>() || maximum == -infinity<A>() ? A(0) : maximum;
  }
  static __device__ __forceinline__ A exponential(A x) {
    if constexpr (sizeof(A) == 8) {
      return exp(x);
    } else {
      // The difference is taken before the scaling, so that it is rounded relative to itself.
      return exp2_approximate(x * 1.4426950408889634f);
    }
  }
  static __device__ __forceinline__ Acc empty() { return {-infinity<A>(), A(0)}; }
  static __device__ __forceinline__ T pad() { return -infinity<T>(); }
  static __device__ __forceinline__ A rescaled(Acc acc, A to) {
    // Nothing was added yet: 0 times an overflowing factor would be NaN.
    if (acc.maximum == -infinity<A>()) return A(0);
    return acc.sum * exponential(anchor(acc.maximum) - to);
  }
  static __device__ __forceinline__ Acc merge(Acc a, Acc b) {
    const A maximum = max_nan(a.maximum, b.maximum);
    const A to = anchor(maximum);
    return {maximum, rescaled(a, to) + rescaled(b, to)};
  }
  template <int kCount>
  static __device__ __forceinline__ Acc fold(const T (&values)[kCount]) {
    A wide[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) wide[i] = widen<A>(values[i]);
    A maximum = wide[0];
#pragma unroll
    for (int i = 1; i < kCount; ++i) maximum = max_nan(maximum, wide[i]);
    const A from = anchor(maximum);
#pragma unroll
    for (int i = 0; i < kCount; ++i) wide[i] = exponential(wide[i] - from);
#pragma unroll
    for (int step = 1; step < kCount; step *= 2) {
#pragma unroll
      for (int i = 0; i + step < kCount; i += 2 * step) wide[i] += wide[i + step];
    }
    return {maximum, wide[0]};
  }
  static __device__ __forceinline__ T finish(Acc acc, long long) {
    return narrow<T>(anchor(acc.maximum) + log(acc.sum));
  }
};

// Whether an element is not zero; NaN is not.
template <typename T>
__device__ __forceinline__ int is_true(T value) {
  return widen<Wide<T>>(value) != Wide<T>(0);
}

template <typename T>
struct Any : Fold<Any<T>, T, int> {
  using Acc = int;
  using Out = bool;
  static __device__ __forceinline__ Acc empty() { return 0; }
  static __device__ __forceinline__ T pad() { return narrow<T>(0.0f); }
  static __device__ __forceinline__ Acc one(T value) { return is_true(value); }
  static __device__ __forceinline__ Acc merge(Acc a, Acc b) { return a | b; }
  static __device__ __forceinline__ bool finish(Acc acc, long long) { return acc != 0; }
};

template <typename T>
struct All : Fold<All<T>, T, int> {
  using Acc = int;
  using Out = bool;
  static __device__ __forceinline__ Acc empty() { return 1; }
  static __device__ __forceinline__ T pad() { return narrow<T>(1.0f); }
  static __device__ __forceinline__ Acc one(T value) { return is_true(value); }
  static __device__ __forceinline__ Acc merge(Acc a, Acc b) { return a & b; }
  static __device__ __forceinline__ bool finish(Acc acc, long long) { return acc != 0; }
};

}  // namespace fusedops
