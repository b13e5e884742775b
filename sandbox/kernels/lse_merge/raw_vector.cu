// A few lanes of a warp a row, each with vectors of both states on their way before the weights are
// known; one 16-byte vector a lane where heads are 128 wide.
#include "merge.cuh"
#include "overlap.cuh"

constexpr int IN_BYTES = ELEMENTS * int(sizeof(ELEMENT));
constexpr int OUT_BYTES = ELEMENTS * int(sizeof(RESULT));
constexpr int VECTORS = HEAD_DIM / ELEMENTS;
constexpr int LANES = lanes_for(VECTORS);
constexpr int PER_LANE = (VECTORS + LANES - 1) / LANES;
constexpr int IN_FLIGHT = PER_LANE < MAX_IN_FLIGHT ? PER_LANE : MAX_IN_FLIGHT;

extern "C" __global__ void __launch_bounds__(THREADS)
    lse_merge_vector(const ELEMENT* prefix, const float* prefix_lse, const ELEMENT* suffix,
                     const float* suffix_lse, RESULT* out, float* out_lse,
                     const MergeStrides strides, long long rows, float to_natural,
                     float from_natural, const float* output_scale, long long context_tokens) {
  wait_for_previous_kernel();
  const int lane = threadIdx.x % LANES;
  const long long row = blockIdx.x * (long long)(THREADS / LANES) + threadIdx.x / LANES;
  const bool exists = row < rows;
  const long long token = (unsigned long long)row / HEADS;
  const int head = int(row - token * HEADS);
  const bool has_prefix = !CONTEXT || token < context_tokens;
  const char* left_row = reinterpret_cast<const char*>(prefix + strides.prefix(token, head));
  const char* right_row = reinterpret_cast<const char*>(suffix + strides.suffix(token, head));
  char* merged_row = reinterpret_cast<char*>(out + strides.out(token, head));
  const int end = exists ? VECTORS : 0;

  float left_lse = 0.0f, right_lse = 0.0f;
  if (exists) {
    left_lse = has_prefix ? prefix_lse[strides.prefix_lse(token, head)] : NO_LSE;
    right_lse = suffix_lse[strides.suffix_lse(token, head)];
  }
  const float scale = load_scale<RESULT>(output_scale);
  MergeWeights weights;
#pragma unroll 1
  for (int first = lane; first < LANES * PER_LANE; first += LANES * IN_FLIGHT) {
    Vector<IN_BYTES> left[IN_FLIGHT], right[IN_FLIGHT];
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      const int vector = first + LANES * i;
      if (vector < end) {
        left[i] = Vector<IN_BYTES>{};
        if (has_prefix) left[i] = stream_in<IN_BYTES>(left_row + vector * IN_BYTES);
        right[i] = stream_in<IN_BYTES>(right_row + vector * IN_BYTES);
      }
    }
    if (first == lane) weights = weigh(left_lse, right_lse, to_natural, from_natural);
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      const int vector = first + LANES * i;
      if (vector < end) {
        store_once<OUT_BYTES>(
            merged_row + vector * OUT_BYTES,
            merged<ELEMENT, RESULT, ELEMENTS>(weights, left[i], right[i], 1.0f / scale));
      }
    }
  }
  __syncwarp();  // all lanes have read the row's LSEs, one of which out_lse may be
  if (exists && lane == 0 && out_lse != nullptr) {
    out_lse[strides.out_lse(token, head)] = weights.lse;
  }
}
