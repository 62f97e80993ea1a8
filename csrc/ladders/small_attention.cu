// Idea: attention in two forms. Materialised: write the N x N scores, normalise them in a pass of
//   their own, read them again for the values. Online: keep a running maximum and sum for each row,
//   so that scores live in registers only. Both count every element that they move.
// Wall: memory. Materialised scores move O(N d + N^2) elements. The online form moves
//   O(N^2 d^2 / M) with M elements on chip: keys and values again for each block of rows. What O()
//   hides is 6 for the former (a score is moved four times, and blocks of 64 rows read keys and
//   values again) and 2 M / (rows d) for the latter, 8 with 16 rows and towards 4 with more.
// Lever: more rows a block (a larger M), and tensor cores, without which the products are the wall.
//   Source: Dao et al., "FlashAttention" (2022), theorem 2.

namespace fusedops {

constexpr int kDim = 64;
constexpr int kKeys = 32;  // a lane each
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kPitch = kDim + 1;  // lanes that read one column each then meet 32 banks
constexpr unsigned kAll = 0xffffffffu;

// Counts the elements that a thread moves to or from global memory.
struct Meter {
  unsigned long long moved = 0;
  __device__ float load(const float* place) { return ++moved, *place; }
  __device__ void store(float* place, float value) { ++moved, *place = value; }
  // Every thread of the block calls it once.
  __device__ void report(unsigned long long* total) {
    for (int offset = 16; offset > 0; offset /= 2) moved += __shfl_xor_sync(kAll, moved, offset);
    if (threadIdx.x % 32 == 0) atomicAdd(total, moved);
  }
};

__device__ __forceinline__ float warp_max(float value) {
  for (int offset = 16; offset > 0; offset /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kAll, value, offset));
  }
  return value;
}

__device__ __forceinline__ float warp_sum(float value) {
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(kAll, value, offset);
  return value;
}

// Rows of (rows, kDim) into shared memory, between two barriers.
__device__ __forceinline__ void load_tile(Meter& meter, float* tile, const float* from, int rows,
                                          float scale) {
  __syncthreads();
  for (int i = threadIdx.x; i < rows * kDim; i += kThreads) {
    tile[i / kDim * kPitch + i % kDim] = scale * meter.load(from + i);
  }
  __syncthreads();
}

// The score of one row against this lane's key.
__device__ __forceinline__ float score_of(const float* row, const float* keys) {
  const float* key = keys + threadIdx.x % 32 * kPitch;
  float sum = 0.0f;
#pragma unroll 16
  for (int c = 0; c < kDim; ++c) sum = fmaf(row[c], key[c], sum);
  return sum;
}

// Adds 32 weighted values to a row, of which each lane holds two columns.
__device__ __forceinline__ void add_values(float (&row)[2], float weight, const float* values) {
  const float* column = values + threadIdx.x % 32;
#pragma unroll
  for (int key = 0; key < kKeys; ++key) {
    const float part = __shfl_sync(kAll, weight, key);
    row[0] = fmaf(part, column[key * kPitch], row[0]);
    row[1] = fmaf(part, column[key * kPitch + 32], row[1]);
  }
}

// q, k, v, out: (heads, length, kDim); kRows and kKeys divide the length. A block takes kRows rows
// of one head, a warp kRows / kWarps of them. Shared: (kRows + kKeys) x kPitch floats.
template <int kRows>
__global__ void __launch_bounds__(kThreads)
    small_attention_online(const float* q, const float* k, const float* v, float* out,
                           unsigned long long* moved, float scale, int length) {
  extern __shared__ float rows[];
  float* tile = rows + kRows * kPitch;
  constexpr int kOwn = kRows / kWarps;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const long long head = static_cast<long long>(blockIdx.y) * length * kDim;
  const long long first = head + static_cast<long long>(blockIdx.x) * kRows * kDim;
  Meter meter;
  load_tile(meter, rows, q + first, kRows, scale);
  float high[kOwn], sum[kOwn], acc[kOwn][2], weight[kOwn];
#pragma unroll
  for (int r = 0; r < kOwn; ++r) {
    high[r] = __int_as_float(0xff800000);  // minus infinity
    sum[r] = acc[r][0] = acc[r][1] = 0.0f;
  }
  for (int key = 0; key < length; key += kKeys) {
    load_tile(meter, tile, k + head + static_cast<long long>(key) * kDim, kKeys, 1.0f);
#pragma unroll
    for (int r = 0; r < kOwn; ++r) {
      const float score = score_of(rows + (warp * kOwn + r) * kPitch, tile);
      const float top = fmaxf(high[r], warp_max(score));
      // What was summed under the old maximum is brought to the new one.
      const float fix = __expf(high[r] - top);
      weight[r] = __expf(score - top);
      sum[r] = fmaf(sum[r], fix, warp_sum(weight[r]));
      acc[r][0] *= fix;
      acc[r][1] *= fix;
      high[r] = top;
    }
    load_tile(meter, tile, v + head + static_cast<long long>(key) * kDim, kKeys, 1.0f);
#pragma unroll
    for (int r = 0; r < kOwn; ++r) add_values(acc[r], weight[r], tile);
  }
#pragma unroll
  for (int r = 0; r < kOwn; ++r) {
    float* row = out + first + (warp * kOwn + r) * kDim + lane;
    meter.store(row, acc[r][0] / sum[r]);
    meter.store(row + 32, acc[r][1] / sum[r]);
  }
  meter.report(moved);
}

// scores: (heads, length, length).
template <int kRows>
__global__ void __launch_bounds__(kThreads)
    small_attention_scores(const float* q, const float* k, float* scores, unsigned long long* moved,
                           float scale, int length) {
  extern __shared__ float rows[];
  float* tile = rows + kRows * kPitch;
  constexpr int kOwn = kRows / kWarps;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const long long head = static_cast<long long>(blockIdx.y) * length;
  const long long first = head + static_cast<long long>(blockIdx.x) * kRows;
  Meter meter;
  load_tile(meter, rows, q + first * kDim, kRows, scale);
  for (int key = 0; key < length; key += kKeys) {
    load_tile(meter, tile, k + (head + key) * kDim, kKeys, 1.0f);
#pragma unroll
    for (int r = 0; r < kOwn; ++r) {
      const int row = warp * kOwn + r;
      meter.store(scores + (first + row) * length + key + lane,
                  score_of(rows + row * kPitch, tile));
    }
  }
  meter.report(moved);
}

// A block a row, which shared memory holds: each score is read once and written once.
__global__ void __launch_bounds__(kThreads)
    small_attention_softmax(float* scores, unsigned long long* moved, int length) {
  extern __shared__ float row[];
  __shared__ float of_warp[kWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float* own = scores + static_cast<long long>(blockIdx.x) * length;
  Meter meter;
  float high = __int_as_float(0xff800000);
  for (int i = threadIdx.x; i < length; i += kThreads) {
    row[i] = meter.load(own + i);
    high = fmaxf(high, row[i]);
  }
  high = warp_max(high);
  if (lane == 0) of_warp[warp] = high;
  __syncthreads();
  high = warp_max(of_warp[lane % kWarps]);
  __syncthreads();
  float sum = 0.0f;
  for (int i = threadIdx.x; i < length; i += kThreads) {
    row[i] = __expf(row[i] - high);
    sum += row[i];
  }
  sum = warp_sum(sum);
  if (lane == 0) of_warp[warp] = sum;
  __syncthreads();
  sum = warp_sum(lane < kWarps ? of_warp[lane] : 0.0f);
  for (int i = threadIdx.x; i < length; i += kThreads) meter.store(own + i, row[i] / sum);
  meter.report(moved);
}

// out = weights @ v, with the same tiles. Shared: kKeys x kPitch floats.
template <int kRows>
__global__ void __launch_bounds__(kThreads)
    small_attention_values(const float* weights, const float* v, float* out,
                           unsigned long long* moved, int length) {
  extern __shared__ float tile[];
  constexpr int kOwn = kRows / kWarps;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const long long head = static_cast<long long>(blockIdx.y) * length;
  const long long first = head + static_cast<long long>(blockIdx.x) * kRows + warp * kOwn;
  Meter meter;
  float acc[kOwn][2] = {};
  for (int key = 0; key < length; key += kKeys) {
    load_tile(meter, tile, v + (head + key) * kDim, kKeys, 1.0f);
#pragma unroll
    for (int r = 0; r < kOwn; ++r) {
      add_values(acc[r], meter.load(weights + (first + r) * length + key + lane), tile);
    }
  }
#pragma unroll
  for (int r = 0; r < kOwn; ++r) {
    float* row = out + (first + r) * kDim + lane;
    meter.store(row, acc[r][0]);
    meter.store(row + 32, acc[r][1]);
  }
  meter.report(moved);
}

}  // namespace fusedops
