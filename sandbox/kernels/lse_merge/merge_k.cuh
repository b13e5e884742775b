// K partial attention states of one (token, head) row.
#pragma once
#include "merge.cuh"

// In elements.
struct MergeKStrides {
  RowStrides partials, lses, out, out_lse;
  long long partials_state, lses_state;
};

constexpr float EMPTY = -1.0f;  // the weight of a state that must not be multiplied

// Weight of a state against the largest LSE of the row, or EMPTY; NaN stays NaN.
__device__ __forceinline__ float weight_of(float lse, float top, float to_natural) {
  return isinf(lse) ? EMPTY : expf((lse - top) * to_natural);
}

__device__ __forceinline__ float merged_lse(float top, float total, float from_natural) {
  return total == 0.0f ? NO_LSE : top + logf(total) * from_natural;
}

// Results of a row from its weighted means; exactly 0 where no state counted.
template <class Result, int Count>
__device__ __forceinline__ Elements<Result, Count> merged_states(float (&means)[Count], float total,
                                                                 float inverse) {
  if (total == 0.0f) return Elements<Result, Count>{};
  return rounded<Result, Count>(means, inverse);
}
