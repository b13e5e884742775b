// A thread a block of 16 values (threads side by side where rows allow no wide access), one pass.
#include "e2m1.cuh"
#include "groups.cuh"
#include "overlap.cuh"
#include "scales.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    quantize_nvfp4_vector(const char* x, long long x_stride, const float* global_scale, char* out,
                          long long out_stride, char* scales, long long scale_stride, int blocks) {
  wait_for_previous_kernel();
  const long long token = blockIdx.x;
  char* to = out + token * out_stride;
  unsigned char* block_scales = reinterpret_cast<unsigned char*>(scales + token * scale_stride);
  const float global = *global_scale;
  walk_groups(x + token * x_stride, blocks, [&](int block, GroupPart& part) {
    part.drop_nans();
    const unsigned char scale = block_scale(part.amax, global);
    const float step = block_step(scale, global);
    const bool small = part.finite && scale < 0x7e;  // else it may have saturated
    char* codes = to + block * (long long)(GROUP / 2);
    part.divide(step, small, [&](int column, const float (&quotients)[COUNT]) {
      store_once<COUNT / 2>(codes + column / 2, step > 0.0f ? pack_e2m1<COUNT>(quotients)
                                                             : Vector<COUNT / 2>());
    });
    if (part.lane == 0) block_scales[block] = scale;
  });
}
