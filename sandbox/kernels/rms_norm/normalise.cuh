// What becomes of one element of a row.
#pragma once
#include "scalar.cuh"

// Rounded before the product with the weight, and once more after it, which the caller does.
template <class Element>
__device__ __forceinline__ float normalised(float value, float scale, float weight) {
  return to_float(from_float<Element>(value * scale)) * weight;
}
