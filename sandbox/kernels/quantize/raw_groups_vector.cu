// Threads side by side have a group and pass over it once.
#include "groups.cuh"
#include "overlap.cuh"
#include "scales.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    quantize_groups_vector(const char* x, long long x_stride, char* out, long long out_stride,
                           char* scales, long long scale_token_stride,
                           long long scale_group_stride, int groups, bool power_of_two) {
  wait_for_previous_kernel();
  const long long token = blockIdx.x;
  char* to = out + token * out_stride;
  scales += token * scale_token_stride;
  walk_groups(x + token * x_stride, groups, [&](int group, const GroupPart& part) {
    const float scale = group_scale(part.amax, power_of_two);
    char* codes = to + group * (long long)GROUP;
    part.divide(scale, part.finite, [&](int column, const float (&quotients)[COUNT]) {
      store_once<COUNT>(codes + column, pack_fp8<E4M3, COUNT>(quotients));
    });
    if (part.lane == 0) *reinterpret_cast<float*>(scales + group * scale_group_stride) = scale;
  });
}
