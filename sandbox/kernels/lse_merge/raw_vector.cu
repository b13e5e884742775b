// A few lanes of a warp a row, each with vectors of both states on their way before the weights are
// known; one 16-byte vector a lane where heads are 128 wide.
#include "merge.cuh"
#include "overlap.cuh"

constexpr int VECTORS = HEAD_DIM * int(sizeof(ELEMENT)) / VECTOR;
constexpr int LANES = lanes_for(VECTORS);
constexpr int PER_LANE = (VECTORS + LANES - 1) / LANES;
constexpr int IN_FLIGHT = PER_LANE < MAX_IN_FLIGHT ? PER_LANE : MAX_IN_FLIGHT;

extern "C" __global__ void __launch_bounds__(THREADS, PER_LANE == 1 ? BLOCKS_PER_SM : 1)
    lse_merge_vector(const ELEMENT* prefix, const float* prefix_lse, const ELEMENT* suffix,
                     const float* suffix_lse, ELEMENT* out, float* out_lse,
                     const MergeStrides strides, long long rows, float to_natural,
                     float from_natural) {
  wait_for_previous_kernel();
  const int lane = threadIdx.x % LANES;
  const long long row = blockIdx.x * (long long)(THREADS / LANES) + threadIdx.x / LANES;
  const bool exists = row < rows;
  const long long token = (unsigned long long)row / HEADS;
  const int head = int(row - token * HEADS);
  const char* left_row = reinterpret_cast<const char*>(prefix + strides.prefix(token, head));
  const char* right_row = reinterpret_cast<const char*>(suffix + strides.suffix(token, head));
  char* merged_row = reinterpret_cast<char*>(out + strides.out(token, head));
  const int end = exists ? VECTORS : 0;

  float left_lse = 0.0f, right_lse = 0.0f;
  if (exists) {
    left_lse = prefix_lse[strides.prefix_lse(token, head)];
    right_lse = suffix_lse[strides.suffix_lse(token, head)];
  }
  MergeWeights weights;
#pragma unroll 1
  for (int first = lane; first < LANES * PER_LANE; first += LANES * IN_FLIGHT) {
    Vector<VECTOR> left[IN_FLIGHT], right[IN_FLIGHT];
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      const int vector = first + LANES * i;
      if (vector < end) {
        left[i] = stream_in<VECTOR>(left_row + vector * VECTOR);
        right[i] = stream_in<VECTOR>(right_row + vector * VECTOR);
      }
    }
    if (first == lane) weights = weigh(left_lse, right_lse, to_natural, from_natural);
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      const int vector = first + LANES * i;
      if (vector < end) {
        store_once<VECTOR>(merged_row + vector * VECTOR,
                           merged<ELEMENT, VECTOR>(weights, left[i], right[i]));
      }
    }
  }
  __syncwarp();  // all lanes have read the row's LSEs, one of which out_lse may be
  if (exists && lane == 0 && out_lse != nullptr) {
    out_lse[strides.out_lse(token, head)] = weights.lse;
  }
}
