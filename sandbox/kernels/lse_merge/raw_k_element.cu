// A block a row, a thread an element: every thread walks the states twice, for the largest LSE and
// for the sum.
#include "merge_k.cuh"

extern "C" __global__ void __launch_bounds__(1024)
    lse_merge_k_element(const PARTIAL* partials, const float* lses, RESULT* out, float* out_lse,
                        const MergeKStrides strides, int states, int heads, int head_dim,
                        float to_natural, float from_natural, const float* output_scale) {
  const long long token = blockIdx.x / heads;
  const int head = blockIdx.x % heads;
  partials += strides.partials(token, head);
  lses += strides.lses(token, head);
  auto* to = reinterpret_cast<Elements<RESULT, 1>*>(out + strides.out(token, head));
  const float inverse = 1.0f / load_scale<RESULT>(output_scale);
  float top = NO_LSE;
  for (int k = 0; k < states; ++k) {
    const float lse = lses[k * strides.lses_state];
    if (!isinf(lse)) top = fmaxf(top, lse);
  }
  float total = 0.0f;
  for (int i = threadIdx.x; i < head_dim; i += blockDim.x) {
    float sum = -0.0f;  // -0 + x is x, the sign of a zero too
    total = 0.0f;
    for (int k = 0; k < states; ++k) {
      const float weight = weight_of(lses[k * strides.lses_state], top, to_natural);
      if (weight == EMPTY) continue;
      total += weight;
      sum += weight * to_float(partials[k * strides.partials_state + i]);
    }
    float mean[1] = {sum / total};
    to[i] = merged_states<RESULT, 1>(mean, total, inverse);
  }
  if (threadIdx.x == 0 && out_lse != nullptr) {
    out_lse[strides.out_lse(token, head)] = merged_lse(top, total, from_natural);
  }
}
