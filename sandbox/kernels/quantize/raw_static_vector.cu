// A block some columns of a token. A thread loads and stores COUNT values at a time, some of them
// under way before the scale is waited for.
#include "fp8_heads.cuh"
#include "overlap.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    quantize_static_vector(const char* x, long long x_stride, const float* scale, char* out,
                           long long out_stride, int pieces) {
  wait_for_previous_kernel();
  const char* from = x + blockIdx.x * x_stride;
  char* to = out + blockIdx.x * out_stride;
  const int first = blockIdx.y * (THREADS * IN_FLIGHT) + threadIdx.x;
  Elements<ELEMENT, COUNT> loaded[IN_FLIGHT];
#pragma unroll
  for (int i = 0; i < IN_FLIGHT; ++i) {
    const long long column = (first + THREADS * i) * (long long)COUNT;
    if (first + THREADS * i < pieces) loaded[i].load(from + column * (long long)sizeof(ELEMENT));
  }
  const float reciprocal = 1.0f / *scale;
#pragma unroll
  for (int i = 0; i < IN_FLIGHT; ++i) {
    const long long column = (first + THREADS * i) * (long long)COUNT;
    if (first + THREADS * i < pieces) {
      float values[COUNT];
      loaded[i].to_floats(values);
      store_once<COUNT>(to + column, head_codes(values, reciprocal));
    }
  }
}
