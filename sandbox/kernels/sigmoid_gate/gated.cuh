// One gated element.
#pragma once
#include "scalar.cuh"

// x / (1 + exp(-gate)), 0 where the exponential is infinite. What an x of 0 stands before is no gate
// but 0, since 0 * NaN is NaN; chosen here, not behind the quotient, it costs no branch. Elements of
// 16 bits do not show what the fast exponential leaves out.
template <class Element> __device__ __forceinline__ float gated(float x, float gate) {
  const float opening = x == 0.0f ? 0.0f : gate;
  const float less = sizeof(Element) == 2 ? __expf(-opening) : expf(-opening);
  return __fdividef(x, 1.0f + less);
}
