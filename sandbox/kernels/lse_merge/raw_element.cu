// A block a row, a thread an element: every thread weighs the two states for itself.
#include "merge.cuh"

extern "C" __global__ void __launch_bounds__(1024)
    lse_merge_element(const ELEMENT* prefix, const float* prefix_lse, const ELEMENT* suffix,
                      const float* suffix_lse, ELEMENT* out, float* out_lse,
                      const MergeStrides strides, int heads, int head_dim, float to_natural,
                      float from_natural) {
  const long long token = blockIdx.x / heads;
  const int head = blockIdx.x % heads;
  const MergeWeights weights = weigh(prefix_lse[strides.prefix_lse(token, head)],
                                     suffix_lse[strides.suffix_lse(token, head)], to_natural,
                                     from_natural);
  prefix += strides.prefix(token, head);
  suffix += strides.suffix(token, head);
  out += strides.out(token, head);
  for (int i = threadIdx.x; i < head_dim; i += blockDim.x) {
    if (weights.source == BOTH) {
      out[i] = from_float<ELEMENT>(weights.prefix * to_float(prefix[i]) +
                                   weights.suffix * to_float(suffix[i]));
    } else if (weights.source == NEITHER) {
      out[i] = from_float<ELEMENT>(0.0f);
    } else {
      out[i] = weights.source == PREFIX ? prefix[i] : suffix[i];
    }
  }
  __syncthreads();  // all have read the row's LSEs, one of which out_lse may be
  if (threadIdx.x == 0 && out_lse != nullptr) {
    out_lse[strides.out_lse(token, head)] = weights.lse;
  }
}
