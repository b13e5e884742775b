// Weighted values, and how they leave the block.
#pragma once
#include "prefill_block.cuh"
#include "scalar.cuh"

// Adds the weighted values of the first Keys of a tile.
template <int Keys>
__device__ __forceinline__ void add_values(Sums& sums, const Weights& weights, const char* values,
                                           int value_place) {
#pragma unroll
  for (int step = 0; step < Keys / 16; ++step) {
#pragma unroll
    for (int block = 0; block < ValueTile::PADDED / 16; ++block) {
      unsigned int b[4];
      ldmatrix_trans(b, ValueTile::block(values, value_place, step, block));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const unsigned int half[2] = {b[2 * i], b[2 * i + 1]};
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
          float(&sum)[4] = sums[m][2 * block + i];
          mma_m16n8k16<Number>(sum, weights[step][m], half, sum);
        }
      }
    }
  }
}

constexpr int PAIR_BYTES = 2 * int(sizeof(RESULT));

// Rows of the result by columns as the sums lie in registers.
__device__ __forceinline__ void store_row(RESULT* out, const Sums& sums, int m, int half,
                                          float factor) {
#pragma unroll
  for (int n = 0; n < V_DIM / 8; ++n) {
    const float pair[2] = {sums[m][n][half * 2] * factor, sums[m][n][half * 2 + 1] * factor};
    RESULT* const to = out + n * 8 + threadIdx.x % 4 * 2;
    if constexpr (OUT_ELEMENTS > 1) {
      *reinterpret_cast<Vector<PAIR_BYTES>*>(to) = pack<RESULT, PAIR_BYTES>(pair);
    } else {
      to[0] = from_float<RESULT>(pair[0]);
      to[1] = from_float<RESULT>(pair[1]);
    }
  }
}

// 16-bit results leave by whole chunks, from the warp's own rows of the query tile, which nobody
// else has to do with.
constexpr bool STAGED = OUT_ELEMENTS == 8 && sizeof(RESULT) == 2 &&
                        Tile<BLOCK_Q, V_DIM>::PANELS <= QueryTile::PANELS;

__device__ __forceinline__ void stage_row(char* shared, const Sums& sums, int m, int half,
                                          float factor) {
#pragma unroll
  for (int n = 0; n < V_DIM / 8; ++n) {
    const float pair[2] = {sums[m][n][half * 2] * factor, sums[m][n][half * 2 + 1] * factor};
    char* const chunk = shared + Tile<BLOCK_Q, V_DIM>::chunk(own_row(m, half), n);
    reinterpret_cast<Vector<PAIR_BYTES>*>(chunk)[threadIdx.x % 4] = pack<RESULT, PAIR_BYTES>(pair);
  }
}

__device__ __forceinline__ void store_staged(RESULT* out, long long stride, const char* shared,
                                             int rows) {
  constexpr int CHUNKS = V_DIM / 8;
  constexpr int LANES = CHUNKS > 16 ? 32 : CHUNKS > 8 ? 16 : CHUNKS > 4 ? 8 : 4;  // for a row
  constexpr int STEP = 32 / LANES, STEPS = WARP_ROWS / STEP;
  const int lane = threadIdx.x % 32, chunk = lane % LANES;
  const int first = threadIdx.x / 32 * WARP_ROWS + lane / LANES;
  __syncwarp();
  if (chunk >= CHUNKS) return;
  uint4 values[STEPS];
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    const int place = Tile<BLOCK_Q, V_DIM>::chunk(first + i * STEP, chunk);
    values[i] = *reinterpret_cast<const uint4*>(shared + place);
  }
  out += first * stride + chunk * 8;
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    if (i * STEP < rows - first) __stcg(reinterpret_cast<uint4*>(out), values[i]);
    out += STEP * stride;
  }
}
