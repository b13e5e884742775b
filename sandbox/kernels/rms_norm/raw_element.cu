// A block a row, a thread an element, and the row read twice.
#include "scalar.cuh"
#include "sums.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    rms_norm_element(const ELEMENT* x, long long x_stride, const ELEMENT* weight, ELEMENT* out,
                     long long out_stride, int columns, float inverse_columns, float eps) {
  x += blockIdx.x * x_stride;
  out += blockIdx.x * out_stride;
  float sum = 0.0f;
  for (int i = threadIdx.x; i < columns; i += THREADS) {
    const float value = to_float(x[i]);
    sum = fmaf(value, value, sum);
  }
  const float scale = rsqrtf(block_sum<THREADS / 32>(sum) * inverse_columns + eps);
  for (int i = threadIdx.x; i < columns; i += THREADS) {
    const ELEMENT rounded = from_float<ELEMENT>(to_float(x[i]) * scale);
    out[i] = from_float<ELEMENT>(to_float(rounded) * to_float(weight[i]));
  }
}
