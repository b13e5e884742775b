// Scores of a tile of keys: products of queries and keys, and which of them count.
#pragma once
#include "prefill_work.cuh"

// Of the first Keys of a tile.
template <int Keys>
__device__ __forceinline__ void score(Scores& scores, const char* queries, const char* keys,
                                      int query_place, int key_place) {
  const float zero[4] = {};
#pragma unroll
  for (int step = 0; step < KeyTile::PADDED / 16; ++step) {
    unsigned int a[M_TILES][4];
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
      ldmatrix(a[m], QueryTile::block(queries, query_place, m, step));
    }
#pragma unroll
    for (int pair = 0; pair < Keys / 16; ++pair) {
      unsigned int b[4];
      ldmatrix(b, KeyTile::block(keys, key_place, pair, step));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const unsigned int half[2] = {b[2 * i], b[2 * i + 1]};
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
          float(&sum)[4] = scores[m][2 * pair + i];
          if (step == 0) {
            mma_m16n8k16<Number>(sum, a[m], half, zero);
          } else {
            mma_m16n8k16<Number>(sum, a[m], half, sum);
          }
        }
      }
    }
  }
}

__device__ __forceinline__ void hide_unseen(Scores& scores, const Work& work, int first_key) {
  const int first = first_key + int(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int seen = work.seen(own_row(m, half)) - first;
#pragma unroll
      for (int n = 0; n < BLOCK_K / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (n * 8 + i >= seen) scores[m][n][half * 2 + i] = NEGATIVE_INFINITY;
        }
      }
    }
  }
}
