// A block a row, a thread an element: every thread weighs the two states for itself.
#include "merge.cuh"

extern "C" __global__ void __launch_bounds__(1024)
    lse_merge_element(const ELEMENT* prefix, const float* prefix_lse, const ELEMENT* suffix,
                      const float* suffix_lse, RESULT* out, float* out_lse,
                      const MergeStrides strides, int heads, int head_dim, float to_natural,
                      float from_natural, const float* output_scale, long long context_tokens) {
  const long long token = blockIdx.x / heads;
  const int head = blockIdx.x % heads;
  const bool has_prefix = !CONTEXT || token < context_tokens;
  const float scale = load_scale<RESULT>(output_scale);
  const MergeWeights weights = weigh(
      has_prefix ? prefix_lse[strides.prefix_lse(token, head)] : NO_LSE,
      suffix_lse[strides.suffix_lse(token, head)], to_natural, from_natural);
  const float inverse = 1.0f / scale;
  using Bits = Elements<ELEMENT, 1>;
  const Bits* left = reinterpret_cast<const Bits*>(prefix + strides.prefix(token, head));
  const Bits* right = reinterpret_cast<const Bits*>(suffix + strides.suffix(token, head));
  auto* to = reinterpret_cast<Elements<RESULT, 1>*>(out + strides.out(token, head));
  for (int i = threadIdx.x; i < head_dim; i += blockDim.x) {
    to[i] = merged<ELEMENT, RESULT, 1>(weights, has_prefix ? left[i] : Bits{}, right[i], inverse);
  }
  __syncthreads();  // all have read the row's LSEs, one of which out_lse may be
  if (threadIdx.x == 0 && out_lse != nullptr) {
    out_lse[strides.out_lse(token, head)] = weights.lse;
  }
}
