// Few tokens: each row of the weight is read once, by LANES threads that share ROWS rows, and meets
// all tokens on the way. What the first loads want is on its way to L2 before the kernel ahead is
// done, and is read only afterwards.
#include "overlap.cuh"
#include "scalar.cuh"
#include "sums.cuh"

constexpr int COUNT = VECTOR / int(sizeof(ELEMENT));
constexpr int GROUPS = THREADS / LANES;
constexpr int WARPS = LANES / 32;
constexpr int AHEAD = 8 / ROWS;  // vectors of each row that a thread has on the way

__device__ __forceinline__ void prefetch_to_l2(const void* address) {
#ifndef SANDBOX_HOST
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS)
    linear_few_tokens(const ELEMENT* x, long long x_stride, const ELEMENT* weight,
                      long long weight_stride, const ELEMENT* bias, ELEMENT* out,
                      long long out_stride, int tokens, int outputs, int columns) {
  const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
  const int first_row = (blockIdx.x * GROUPS + group) * ROWS;
  const ELEMENT* rows[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    rows[r] = weight + min(first_row + r, outputs - 1) * weight_stride;
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const int column = (lane + i * LANES) * COUNT;
      if (lane * VECTOR % 128 == 0 && column < columns) prefetch_to_l2(rows[r] + column);
    }
  }
  wait_for_previous_kernel();

  float sums[TOKENS][ROWS] = {};
  for (int first = lane * COUNT; first < columns; first += AHEAD * LANES * COUNT) {
    Vector<VECTOR> from[AHEAD][ROWS];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const int column = first + i * LANES * COUNT;
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        if (column < columns) from[i][r] = load_ahead<VECTOR>(rows[r] + column);
      }
    }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const int column = first + i * LANES * COUNT;
      if (column >= columns) break;
      float values[TOKENS][COUNT];
#pragma unroll
      for (int t = 0; t < TOKENS; ++t) {
        const ELEMENT* row = x + min(t, tokens - 1) * x_stride;
        unpack<ELEMENT, VECTOR>(*reinterpret_cast<const Vector<VECTOR>*>(row + column), values[t]);
      }
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        float weights[COUNT];
        unpack<ELEMENT, VECTOR>(from[i][r], weights);
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
#pragma unroll
          for (int j = 0; j < COUNT; ++j) {
            sums[t][r] = fmaf(values[t][j], weights[j], sums[t][r]);
          }
        }
      }
    }
  }

  __shared__ float of_warps[GROUPS][WARPS][TOKENS * ROWS];
#pragma unroll
  for (int t = 0; t < TOKENS; ++t) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const float sum = warp_sum(sums[t][r]);
      if (lane % 32 == 0) of_warps[group][lane / 32][t * ROWS + r] = sum;
    }
  }
  if constexpr (WARPS > 1) {
    __syncthreads();
  } else {
    __syncwarp();
  }
  if (lane >= TOKENS * ROWS) return;
  const int t = lane / ROWS, row = first_row + lane % ROWS;
  if (t >= tokens || row >= outputs) return;
  float sum = bias == nullptr ? 0.0f : to_float(bias[row]);
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) sum += of_warps[group][warp][lane];
  out[t * out_stride + row] = from_float<ELEMENT>(sum);
}
