// One thread a value.
#include "fp8.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    quantize_static_element(const char* x, long long x_stride, const float* scale, char* out,
                            long long out_stride, int width, long long values) {
  const long long index = blockIdx.x * (long long)THREADS + threadIdx.x;
  if (index >= values) return;
  const long long token = index / width;
  const int column = int(index - token * width);
  const ELEMENT value = reinterpret_cast<const ELEMENT*>(x + token * x_stride)[column];
  const float scaled[1] = {to_float(value) * (1.0f / *scale)};
  *reinterpret_cast<Vector<1>*>(out + token * out_stride + column) = pack_fp8<E4M3, 1>(scaled);
}
