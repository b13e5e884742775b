// The 4-bit float E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign.
#pragma once
#include "vector.cuh"

// The code of a number (no NaN): to nearest, ties to even, saturating.
__device__ __forceinline__ unsigned int e2m1_from_float(float value) {
  const float magnitude = fminf(fabsf(value), 6.0f);
  const unsigned int exponent = max(__float_as_uint(magnitude) >> 23, 127u);
  // A float whose last place is worth what a step between codes of this exponent is.
  const float coarse = __uint_as_float((exponent + 22u) << 23);
  const unsigned int steps = __float_as_uint(magnitude + coarse) - __float_as_uint(coarse);
  return (steps + 2u * (exponent - 127u)) | (__float_as_uint(value) >> 28 & 8u);
}

// Count codes, the first of each two in the low bits of a byte; Count is even.
template <int Count>
__device__ __forceinline__ Vector<Count / 2> pack_e2m1(const float (&values)[Count]) {
  constexpr int WORDS = (Count + 7) / 8;
  unsigned int words[WORDS] = {};
#pragma unroll
  for (int i = 0; i < Count; ++i) words[i / 8] |= e2m1_from_float(values[i]) << 4 * (i % 8);
  Vector<Count / 2> to;
  memcpy(&to, words, Count / 2);
  return to;
}
