// Up to a warp a stretch of a row, a vector a lane: the lanes weigh the states among them, one each,
// and pass the weights round by shuffles; the next IN_FLIGHT partials are always on their way.
#include "merge_k.cuh"

constexpr int VECTORS = HEAD_DIM / ELEMENTS;
constexpr int LANES = lanes_for(VECTORS);
constexpr int SLICES = (VECTORS + LANES - 1) / LANES;
constexpr int IN_BYTES = ELEMENTS * int(sizeof(PARTIAL));
constexpr int OUT_BYTES = ELEMENTS * int(sizeof(RESULT));
constexpr unsigned WARP = 0xffffffffu;

extern "C" __global__ void __launch_bounds__(THREADS)
    lse_merge_k_vector(const PARTIAL* __restrict__ partials, const float* __restrict__ lses,
                       RESULT* __restrict__ out, float* __restrict__ out_lse,
                       const MergeKStrides strides, int states, long long rows, float to_natural,
                       float from_natural, const float* __restrict__ output_scale) {
  const int lane = threadIdx.x % LANES;
  const unsigned long long group =
      blockIdx.x * (unsigned long long)(THREADS / LANES) + threadIdx.x / LANES;
  const long long row = group / SLICES;
  const int slice = int(group % SLICES);
  const long long token = (unsigned long long)row / HEADS;
  const int head = int(row - token * HEADS);
  const bool exists = row < rows;
  const int vector = slice * LANES + lane;
  const bool busy = exists && vector < VECTORS;
  const int mine = exists ? states : 0;  // states that this lane may look at
  const PARTIAL* partial = partials + strides.partials(token, head) + vector * ELEMENTS;
  const float* lse = lses + strides.lses(token, head);

  Vector<IN_BYTES> next[IN_FLIGHT];
  const auto fetch = [&](int first) {
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      if (busy && first + i < states) {
        next[i] = load_once<IN_BYTES>(partial + (first + i) * strides.partials_state);
      }
    }
  };
  fetch(0);
  const float code_scale = load_scale<RESULT>(output_scale);

  float top = NO_LSE;
  for (int k = lane; k < mine; k += LANES) {
    const float value = lse[k * strides.lses_state];
    if (!isinf(value)) top = fmaxf(top, value);
  }
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2) {
    top = fmaxf(top, __shfl_xor_sync(WARP, top, step, LANES));
  }
  float total = 0.0f;
  for (int k = lane; k < mine; k += LANES) {
    const float weight = weight_of(lse[k * strides.lses_state], top, to_natural);
    if (weight != EMPTY) total += weight;
  }
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2) {
    total += __shfl_xor_sync(WARP, total, step, LANES);
  }
  const float scale = 1.0f / total;

  float sum[ELEMENTS];
#pragma unroll
  for (int e = 0; e < ELEMENTS; ++e) sum[e] = -0.0f;  // -0 + x is x, the sign of a zero too
  float held = EMPTY;  // this lane's weight among the LANES states at hand
#pragma unroll 1
  for (int first = 0; first < states; first += IN_FLIGHT) {
    Vector<IN_BYTES> current[IN_FLIGHT];
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) current[i] = next[i];
    fetch(first + IN_FLIGHT);
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      const int k = first + i;
      if (k % LANES == 0) {
        held = EMPTY;
        if (k + lane < mine) held = weight_of(lse[(k + lane) * strides.lses_state], top, to_natural);
        if (held != EMPTY) held *= scale;
      }
      const float weight = __shfl_sync(WARP, held, k % LANES, LANES);
      if (weight != EMPTY) {
        float values[ELEMENTS];
        unpack<PARTIAL, IN_BYTES>(current[i], values);
#pragma unroll
        for (int e = 0; e < ELEMENTS; ++e) sum[e] += weight * values[e];
      }
    }
  }
  if (busy) {
    store_once<OUT_BYTES>(out + strides.out(token, head) + vector * ELEMENTS,
                          merged_states<RESULT, ELEMENTS>(sum, total, 1.0f / code_scale));
  }
  if (exists && lane == 0 && slice == 0 && out_lse != nullptr) {
    out_lse[strides.out_lse(token, head)] = merged_lse(top, total, from_natural);
  }
}
