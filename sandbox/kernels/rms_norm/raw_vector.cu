// Part of a warp, or a block, a row, which stays in registers from the sum of its squares to the
// products: one trip to memory. The weight is on its way with it.
#include "normalise.cuh"
#include "overlap.cuh"
#include "sums.cuh"

constexpr int COUNT = VECTOR / int(sizeof(ELEMENT));

extern "C" __global__ void __launch_bounds__(THREADS)
    rms_norm_vector(const ELEMENT* x, long long x_stride, const ELEMENT* weight, ELEMENT* out,
                    long long out_stride, long long rows, int columns, float inverse_columns,
                    float eps) {
  wait_for_previous_kernel();
  const long long row = blockIdx.x * (long long)(THREADS / LANES) + threadIdx.x / LANES;
  const int lane = threadIdx.x % LANES;
  const int end = row < rows ? columns : 0;
  x += row * x_stride;
  out += row * out_stride;

  Vector<VECTOR> values[PER_LANE], weights[PER_LANE];
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    const int column = (lane + LANES * i) * COUNT;
    values[i] = Vector<VECTOR>{};
    if (column < end) {
      values[i] = load_ahead<VECTOR>(x + column);
      weights[i] = load_ahead<VECTOR>(weight + column);
    }
  }
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    float numbers[COUNT];
    unpack<ELEMENT, VECTOR>(values[i], numbers);
#pragma unroll
    for (int j = 0; j < COUNT; ++j) sum = fmaf(numbers[j], numbers[j], sum);
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
      float numbers[COUNT], factors[COUNT];
      unpack<ELEMENT, VECTOR>(values[i], numbers);
      unpack<ELEMENT, VECTOR>(weights[i], factors);
#pragma unroll
      for (int j = 0; j < COUNT; ++j) {
        numbers[j] = normalised<ELEMENT>(numbers[j], scale, factors[j]);
      }
      *reinterpret_cast<Vector<VECTOR>*>(out + column) = pack<ELEMENT, VECTOR>(numbers);
    }
  }
}
