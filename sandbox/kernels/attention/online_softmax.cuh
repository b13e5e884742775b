// Softmax over scores that come one after the other.
#pragma once

#define NO_KEY_LSE __int_as_float(0xff800000)  // -inf

// What a score is compared with: the largest one, or 0 where all are -inf.
__device__ __forceinline__ float finite_top(float top) { return top == NO_KEY_LSE ? 0.0f : top; }

// 2 to the power of a score less the largest: subnormal results are 0.
__device__ __forceinline__ float power_of_2(float exponent) {
#ifndef SANDBOX_HOST
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
  return power;
#else
  return exp2f(exponent);
#endif
}

struct OnlineSoftmax {
  float top = NO_KEY_LSE;  // the largest score
  float total = 0.0f;      // of exp(score - top)

  // The weight of the next score; all sums of earlier ones must be multiplied by `factor`.
  __device__ __forceinline__ float next(float score, float& factor) {
    const float before = top;
    top = fmaxf(top, score);
    factor = expf(before - finite_top(top));
    const float weight = expf(score - finite_top(top));
    total = total * factor + weight;
    return weight;
  }

  // What sums are multiplied by in the end; no key gives 0.
  __device__ __forceinline__ float inverse() const { return total == 0.0f ? 0.0f : 1.0f / total; }

  __device__ __forceinline__ float lse() const {
    return total == 0.0f ? NO_KEY_LSE : top + logf(total);
  }
};

// What a sink leaves to the keys, whose weights are 0 where there are none.
__device__ __forceinline__ float share_beside(float sink, float lse) {
  return lse == NO_KEY_LSE ? 1.0f : 1.0f / (1.0f + expf(sink - lse));
}
