// The scales of groups, by the largest magnitude of their finite values.
#pragma once
#include "fp8.cuh"

// The descale of E4M3 codes; with `power_of_two` the least one that is not below it.
__device__ __forceinline__ float group_scale(float amax, bool power_of_two) {
  const float scale = fmaxf(amax, 1e-10f) / 448.0f;
  if (!power_of_two) return scale;
  return __uint_as_float((__float_as_uint(scale) + 0x007fffffu) & 0x7f800000u);
}

// The E4M3 code of a block of E2M1 codes' own scale.
__device__ __forceinline__ unsigned char block_scale(float amax, float global_scale) {
  const float scale[1] = {amax / 6.0f / global_scale};
  return pack_fp8<E4M3, 1>(scale);
}

// What a value of the block is divided by; 0 where all codes are 0.
__device__ __forceinline__ float block_step(unsigned char scale, float global_scale) {
  float factor[1];
  unpack_fp8<E4M3, 1>(scale, factor);
  return factor[0] * global_scale;
}
