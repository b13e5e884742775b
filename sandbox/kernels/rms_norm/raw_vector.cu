// Part of a warp, or a block, a row, which stays in registers from the sum of its squares to the
// products: one trip to memory, with the weight on its way beside the row.
#include "overlap.cuh"
#include "scalar.cuh"
#include "sums.cuh"

constexpr int COUNT = VECTOR / int(sizeof(ELEMENT));
constexpr int ROWS = THREADS / LANES;

// Two numbers to an element's precision and back, by the conversion that takes two at a time.
__device__ __forceinline__ float2 rounded(float2 pair, float) { return pair; }
__device__ __forceinline__ float2 rounded(float2 pair, __half) {
  return __half22float2(__floats2half2_rn(pair.x, pair.y));
}
__device__ __forceinline__ float2 rounded(float2 pair, __nv_bfloat16) {
  return __bfloat1622float2(__floats2bfloat162_rn(pair.x, pair.y));
}

extern "C" __global__ void __launch_bounds__(THREADS)
    rms_norm_vector(const ELEMENT* x, long long x_stride, const ELEMENT* weight, ELEMENT* out,
                    long long out_stride, long long rows, int columns, float inverse_columns,
                    float eps) {
  wait_for_previous_kernel();
  const int lane = ROWS > 1 ? threadIdx.x % LANES : threadIdx.x;
  const long long row = blockIdx.x * (long long)ROWS + (ROWS > 1 ? threadIdx.x / LANES : 0);
  const int end = ROWS == 1 || row < rows ? columns : 0;
  x += row * x_stride;
  out += row * out_stride;

  Vector<VECTOR> values[PER_LANE], weights[PER_LANE];
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    const int column = (lane + LANES * i) * COUNT;
    if (column < end) {
      weights[i] = load_ahead<VECTOR>(weight + column);
      values[i] = load_ahead<VECTOR>(x + column);
    }
  }
  float numbers[COUNT], sum = 0.0f;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    if ((lane + LANES * i) * COUNT < end) {
      unpack<ELEMENT, VECTOR>(values[i], numbers);
#pragma unroll
      for (int j = 0; j < COUNT; ++j) sum = fmaf(numbers[j], numbers[j], sum);
    }
  }
  if constexpr (LANES > 32) {
    sum = block_sum<LANES / 32>(sum);
  } else {
    sum = warp_sum<LANES>(sum);
  }
  const float scale = rsqrtf(sum * inverse_columns + eps);
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    const int column = (lane + LANES * i) * COUNT;
    if (column < end) {
      float factors[COUNT];
      unpack<ELEMENT, VECTOR>(values[i], numbers);
      unpack<ELEMENT, VECTOR>(weights[i], factors);
#pragma unroll
      for (int j = 0; j < COUNT; j += 2) {
        const int next = COUNT > 1 ? j + 1 : j;
        const float2 pair = {numbers[j] * scale, numbers[next] * scale};
        const float2 scaled = rounded(pair, ELEMENT());
        numbers[j] = scaled.x * factors[j];
        if (next > j) numbers[next] = scaled.y * factors[next];
      }
      *reinterpret_cast<Vector<VECTOR>*>(out + column) = pack<ELEMENT, VECTOR>(numbers);
    }
  }
}
