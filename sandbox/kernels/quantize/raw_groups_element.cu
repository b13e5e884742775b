// One thread a group, which it reads twice.
#include "scales.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    quantize_groups_element(const char* x, long long x_stride, char* out, long long out_stride,
                            char* scales, long long scale_token_stride,
                            long long scale_group_stride, int groups, int group_size,
                            long long all_groups, bool power_of_two) {
  const long long index = blockIdx.x * (long long)THREADS + threadIdx.x;
  if (index >= all_groups) return;
  const long long token = index / groups, group = index - token * groups;
  const ELEMENT* from =
      reinterpret_cast<const ELEMENT*>(x + token * x_stride) + group * group_size;
  char* to = out + token * out_stride + group * group_size;
  float amax = 0.0f;
  for (int i = 0; i < group_size; ++i) {
    const float magnitude = fabsf(to_float(from[i]));
    if (isfinite(magnitude)) amax = fmaxf(amax, magnitude);
  }
  const float scale = group_scale(amax, power_of_two);
  for (int i = 0; i < group_size; ++i) {
    const float quotient[1] = {to_float(from[i]) / scale};
    reinterpret_cast<Vector<1>*>(to)[i] = pack_fp8<E4M3, 1>(quotient);
  }
  *reinterpret_cast<float*>(scales + token * scale_token_stride + group * scale_group_stride) =
      scale;
}
