// Scores to weights, tile by tile.
#pragma once
#include "online_softmax.cuh"
#include "prefill_block.cuh"

__device__ __forceinline__ unsigned int pack_pair(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  unsigned int bits;
  memcpy(&bits, &pair, sizeof(bits));
  return bits;
}
__device__ __forceinline__ unsigned int pack_pair(float low, float high, __half) {
  const __half2 pair = __floats2half2_rn(low, high);
  unsigned int bits;
  memcpy(&bits, &pair, sizeof(bits));
  return bits;
}

using RowMaxima = float[M_TILES][2];

// Of the thread's own columns.
__device__ __forceinline__ void find_maxima(RowMaxima& top, const Scores& scores) {
#pragma unroll
  for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float most = fmaxf(scores[m][0][half * 2], scores[m][0][half * 2 + 1]);
#pragma unroll
      for (int n = 1; n < BLOCK_K / 8; ++n) {
        most = fmaxf(most, fmaxf(scores[m][n][half * 2], scores[m][n][half * 2 + 1]));
      }
      top[m][half] = most;
    }
  }
}

// A row's weights are 2 ** (score * scale - reference). The reference is not always the largest
// scaled score: it follows only when one is larger by more than SLACK, which no sum overflows for
// and which spares most tiles the exchange between lanes and the scaling of sums.
constexpr float SLACK = 8.0f;

struct Softmax {
  float scale;
  float reference[M_TILES][2];
  float total[M_TILES][2];  // of the thread's own columns

  __device__ __forceinline__ void start(float by) {
    scale = by;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
      reference[m][0] = reference[m][1] = NEGATIVE_INFINITY;
      total[m][0] = total[m][1] = 0.0f;
    }
  }

  __device__ __forceinline__ void raise(const RowMaxima& top, Sums& sums) {
    bool higher = false;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        higher |= fmaf(top[m][half], scale, -reference[m][half]) > SLACK;
      }
    }
    if (!__any_sync(0xffffffffu, higher)) return;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float most = top[m][half];
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
        most = fmaxf(most * scale, reference[m][half]);
        const bool none = most == NEGATIVE_INFINITY;
        const float factor = none ? 1.0f : power_of_2(reference[m][half] - most);
        reference[m][half] = most;
        total[m][half] *= factor;
#pragma unroll
        for (int n = 0; n < ValueTile::PADDED / 8; ++n) {
          sums[m][n][half * 2] *= factor;
          sums[m][n][half * 2 + 1] *= factor;
        }
      }
    }
  }

  // Register i of the weights of 16 keys, as mma wants A.
  __device__ __forceinline__ unsigned int weigh(const Scores& scores, int keys, int m, int i) {
    const int half = i % 2;
    const float(&pair)[4] = scores[m][keys * 2 + i / 2];
    const float from = reference[m][half] == NEGATIVE_INFINITY ? 0.0f : reference[m][half];
    const float low = power_of_2(fmaf(pair[half * 2], scale, -from));
    const float high = power_of_2(fmaf(pair[half * 2 + 1], scale, -from));
    total[m][half] += low + high;
    return pack_pair(low, high, Number());
  }

  __device__ __forceinline__ void weigh(Weights& weights, const Scores& scores) {
#pragma unroll
    for (int step = 0; step < BLOCK_K / 16; ++step) {
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) weights[step][m][i] = weigh(scores, step, m, i);
      }
    }
  }

  __device__ __forceinline__ float whole_total(int m, int half) const {
    float sum = total[m][half];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    return sum + __shfl_xor_sync(0xffffffffu, sum, 2);
  }
};
