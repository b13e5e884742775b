// Elements of any type that queries, keys and values have, as floats.
#pragma once
#include "fp8.cuh"

template <class Scalar> __device__ __forceinline__ float number(Scalar value) {
  return to_float(value);
}
// An E4M3 code, without its descale.
template <> __device__ __forceinline__ float number<unsigned char>(unsigned char code) {
  return floats_from_fp8<E4M3>(code).x;
}

// What codes are multiplied by; numbers have none.
__device__ __forceinline__ float descale_of(const float* descale) {
  return descale == nullptr ? 1.0f : __ldg(descale);
}
