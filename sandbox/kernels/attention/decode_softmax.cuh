// Scores to weights, tile by tile.
#pragma once
#include "decode_scores.cuh"

__device__ __forceinline__ float quad_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, 1));
  return fmaxf(value, __shfl_xor_sync(ALL_LANES, value, 2));
}

__device__ __forceinline__ float quad_sum(float value) {
  value += __shfl_xor_sync(ALL_LANES, value, 1);
  return value + __shfl_xor_sync(ALL_LANES, value, 2);
}

constexpr float LN_2 = 0.69314718056f;
constexpr float LOG2_E = 1.44269504089f;

struct alignas(4 * GROUPS) Groups {
  float of[GROUPS];
};

__device__ __forceinline__ Groups groups_of(const float* row) {
  return *reinterpret_cast<const Groups*>(row);
}

// Weights are relative to a row's largest score of earlier tiles until one is 2 to this power times
// as large, for results need all registers' multiplication then.
constexpr float MOST_GROWTH = 8.0f;

// The softmax so far of the rows whose scores this thread has: the score that weights are relative
// to, and the sum of the weights that it has seen itself.
struct Softmax {
  float top[S_M][2];
  float sum[S_M][2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int m = 0; m < S_M; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        top[m][half] = NO_KEY_LSE;
        sum[m][half] = 0.0f;
      }
    }
  }

  // Scores to 16-bit weights in shared memory, and by how much earlier results shrink. `scale`
  // makes scores exponents of 2. By all threads of a team; a barrier must follow.
  __device__ __forceinline__ void add(const Block& block, const Scores& scores, float scale) {
#pragma unroll
    for (int m = 0; m < S_M; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float largest = NO_KEY_LSE;
#pragma unroll
        for (int n = 0; n < OWN; ++n) {
          largest = fmaxf(largest, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
        }
        largest = quad_max(largest);
        if (block.lane % 4 == 0) {
          block.tops(block.score_row(m, half))[block.group()] = largest;
        }
      }
    }
    block.team_sync();
    char* weights[OWN];  // of this thread's first row
#pragma unroll
    for (int n = 0; n < OWN; ++n) {
      weights[n] = block.weights() + block.lane % 4 * 4 +
                   WeightTile::place(block.score_row(0, 0), block.score_token(n) / 8);
    }
#pragma unroll
    for (int m = 0; m < S_M; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = block.score_row(m, half);
        const Groups tops = groups_of(block.tops(row));
        float largest = tops.of[0];
#pragma unroll
        for (int group = 1; group < GROUPS; ++group) largest = fmaxf(largest, tops.of[group]);
        float shrink = 1.0f;
        if ((largest - top[m][half]) * scale > MOST_GROWTH) {
          shrink = power_of_2((top[m][half] - largest) * scale);
          top[m][half] = largest;
        }
        const float shift = finite_top(top[m][half]) * scale;
        float added = 0.0f;
#pragma unroll
        for (int n = 0; n < OWN; ++n) {
          const float left = power_of_2(fmaf(scores[m][n][2 * half], scale, -shift));
          const float right = power_of_2(fmaf(scores[m][n][2 * half + 1], scale, -shift));
          added += left + right;
          const float pair[2] = {left, right};
          constexpr int ROW_BYTES = WeightTile::STRIDE * 16;
          *reinterpret_cast<unsigned int*>(weights[n] + (m * 16 + half * 8) * ROW_BYTES) =
              pack<ELEMENT, 4>(pair);
        }
        sum[m][half] = sum[m][half] * shrink + added;
        if (block.group() == 0 && block.lane % 4 == 0) block.shrinks()[row] = shrink;
      }
    }
  }

  // Sums of all threads that share a row, in shared memory where `tops` was. By all threads, between
  // barriers.
  __device__ __forceinline__ void publish_sums(const Block& block) const {
#pragma unroll
    for (int m = 0; m < S_M; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float total = quad_sum(sum[m][half]);
        if (block.lane % 4 == 0) {
          block.tops(block.score_row(m, half))[block.group()] = total;
        }
      }
    }
  }
};

__device__ __forceinline__ float sum_of_row(const Block& block, int row) {
  const Groups sums = groups_of(block.tops(row));
  float total = 0.0f;
#pragma unroll
  for (int group = 0; group < GROUPS; ++group) total += sums.of[group];
  return total;
}
