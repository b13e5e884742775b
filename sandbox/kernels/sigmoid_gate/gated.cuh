// One gated element.
#pragma once
#include "scalar.cuh"

// An x of 0 stays what it is: 0 * NaN would be NaN. Nothing overflows, and the divisor is in 1 to 2.
__device__ __forceinline__ float gated(float x, float gate) {
  const float less = expf(-fabsf(gate));
  const float sigmoid = __fdividef(gate >= 0.0f ? 1.0f : less, 1.0f + less);
  return x == 0.0f ? x : x * sigmoid;
}
