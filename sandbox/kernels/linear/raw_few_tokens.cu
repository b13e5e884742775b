// Few tokens: LANES threads keep the tokens' numbers, each PER_LANE vectors of them, and rows of the
// weight go by, one on its way while another is multiplied. What the first rows want is on its way to
// L2 before the kernel ahead is done, and is read only afterwards.
#include "overlap.cuh"
#include "residency.cuh"
#include "scalar.cuh"
#include "sums.cuh"

constexpr int COUNT = VECTOR / int(sizeof(ELEMENT));
constexpr int GROUPS = THREADS / LANES;
constexpr int WARPS = LANES / 32;
using Part = Vector<VECTOR>[PER_LANE];

struct Columns {
  int lane, columns;

  template <class Work> __device__ __forceinline__ void each(const Work& work) const {
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      const int column = (lane + i * LANES) * COUNT;
      if (column < columns) work(i, column);
    }
  }
};

__device__ __forceinline__ void prefetch_to_l2(const void* address) {
#ifndef SANDBOX_HOST
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, resident_blocks(RESIDENT))
    linear_few_tokens(const ELEMENT* x, long long x_stride, const ELEMENT* weight,
                      long long weight_stride, const ELEMENT* bias, ELEMENT* out,
                      long long out_stride, int outputs, int columns) {
  const int group = threadIdx.x / LANES, step = gridDim.x * GROUPS;
  const Columns mine = {int(threadIdx.x % LANES), columns};
  int row = blockIdx.x * GROUPS + group;
  if (row < outputs && mine.lane * VECTOR % 128 == 0) {
    mine.each([&](int, int column) { prefetch_to_l2(weight + row * weight_stride + column); });
  }
  wait_for_previous_kernel();

  Part given[TOKENS], next;
  const auto load = [&](int row) {
    const ELEMENT* from = weight + row * weight_stride;
    mine.each([&](int i, int column) { next[i] = load_ahead<VECTOR>(from + column); });
  };
  if (row < outputs) load(row);
#pragma unroll
  for (int t = 0; t < TOKENS; ++t) {
    const ELEMENT* from = x + t * x_stride;
    mine.each([&](int i, int column) { given[t][i] = load_ahead<VECTOR>(from + column); });
  }

  __shared__ float of_warps[2][GROUPS][WARPS][TOKENS];
  const int turns = (outputs - blockIdx.x * GROUPS + step - 1) / step;  // alike in all threads
  for (int turn = 0; turn < turns; ++turn, row += step) {
    Part now;
    memcpy(&now, &next, sizeof(now));
    if (row + step < outputs) load(row + step);
    float sums[TOKENS] = {};
    mine.each([&](int i, int) {
      float weights[COUNT];
      unpack<ELEMENT, VECTOR>(now[i], weights);
#pragma unroll
      for (int t = 0; t < TOKENS; ++t) {
        float values[COUNT];
        unpack<ELEMENT, VECTOR>(given[t][i], values);
#pragma unroll
        for (int j = 0; j < COUNT; ++j) sums[t] = fmaf(values[j], weights[j], sums[t]);
      }
    });
    float(&parts)[WARPS][TOKENS] = of_warps[turn % 2][group];
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
      const float sum = warp_sum(sums[t]);
      if (mine.lane % 32 == 0) parts[mine.lane / 32][t] = sum;
    }
    if constexpr (WARPS > 1) {
      __syncthreads();
    } else {
      __syncwarp();
    }
    const int t = mine.lane;
    if (t < TOKENS && row < outputs) {
      float sum = bias == nullptr ? 0.0f : to_float(bias[row]);
#pragma unroll
      for (int warp = 0; warp < WARPS; ++warp) sum += parts[warp][t];
      out[t * out_stride + row] = from_float<ELEMENT>(sum);
    }
  }
}
