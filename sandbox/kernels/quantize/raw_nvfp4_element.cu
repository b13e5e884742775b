// One thread a block of 16 values, which it reads twice.
#include "e2m1.cuh"
#include "scales.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    quantize_nvfp4_element(const char* x, long long x_stride, const float* global_scale, char* out,
                           long long out_stride, char* scales, long long scale_stride, int blocks,
                           long long all_blocks) {
  const long long index = blockIdx.x * (long long)THREADS + threadIdx.x;
  if (index >= all_blocks) return;
  const long long token = index / blocks, block = index - token * blocks;
  const ELEMENT* from = reinterpret_cast<const ELEMENT*>(x + token * x_stride) + block * GROUP;
  char* to = out + token * out_stride + block * (GROUP / 2);
  float amax = 0.0f;
  for (int i = 0; i < GROUP; ++i) {
    const float magnitude = fabsf(to_float(from[i]));
    if (isfinite(magnitude)) amax = fmaxf(amax, magnitude);
  }
  const unsigned char scale = block_scale(amax, *global_scale);
  const float step = block_step(scale, *global_scale);
  for (int i = 0; i < GROUP; i += 2) {
    float pair[2];
    for (int j = 0; j < 2; ++j) {
      const float quotient = to_float(from[i + j]) / step;
      pair[j] = isnan(quotient) || step == 0.0f ? 0.0f : quotient;
    }
    reinterpret_cast<Vector<1>*>(to)[i / 2] = pack_e2m1<2>(pair);
  }
  reinterpret_cast<unsigned char*>(scales + token * scale_stride)[block] = scale;
}
