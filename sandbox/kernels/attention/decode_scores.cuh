// Scores of a tile of keys: products of queries and keys, and which of them count.
#pragma once
#include "decode_copy.cuh"
#include "online_softmax.cuh"

using Scores = float[S_M][OWN][4];
using PartialScores = float[S_M][S_N][4];  // over some of the columns

// Scores of the warp's rows and keys, summed over its share of the columns. The factors of a step are
// loaded during the one before, and the next tile's keys are copied meanwhile.
__device__ __forceinline__ void multiply_keys(const Block& block, const char* keys,
                                              KeyCopier& copier, PartialScores& scores) {
  constexpr int STEPS = (KeyTile::STEPS + QK_K - 1) / QK_K;
  constexpr int COPIES = (KeyCopier::PIECES + STEPS - 1) / STEPS;
  constexpr int TURNS = 4 / QK_K;
  const auto query_lane =
      left_lane<QueryTile>(block.shared, block.lane, block.score_row(0, 0) - block.lane / 4,
                           2 * block.qk_k);
  const auto key_lane =
      right_lane<KeyTile>(keys, block.lane, block.qk_n * S_TOKENS, 2 * block.qk_k);
  SharedAddress query_at[TURNS], key_at[TURNS];
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn) {
    query_at[turn] = fresh(query_lane.turned(2 * QK_K * turn));
    key_at[turn] = fresh(key_lane.turned(2 * QK_K * turn));
  }
#pragma unroll
  for (int m = 0; m < S_M; ++m) {
#pragma unroll
    for (int n = 0; n < S_N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[m][n][i] = 0.0f;
    }
  }
  unsigned int a[2][S_M][4], b[2][S_N / 2][4];
  const auto missing = [&](int i) {
    return i >= STEPS || (KeyTile::STEPS % QK_K != 0 && i == STEPS - 1 && block.qk_k != 0);
  };
  const auto load = [&](int i) {
#pragma unroll
    for (int m = 0; m < S_M; ++m) {
      ldmatrix(a[i % 2][m], query_at[i % TURNS] + query_lane.further(m * 16, 2 * QK_K * i));
    }
#pragma unroll
    for (int n = 0; n < S_N / 2; ++n) {
      ldmatrix(b[i % 2][n], key_at[i % TURNS] + key_lane.further(n * 16, 2 * QK_K * i));
    }
  };
  if (!missing(0)) load(0);
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    if (!missing(i + 1)) load(i + 1);
#pragma unroll
    for (int piece = i * COPIES; piece < min((i + 1) * COPIES, KeyCopier::PIECES); ++piece) {
      copier.start(piece);
    }
    if (missing(i)) break;
#pragma unroll
    for (int n = 0; n < S_N; n += 2) {
#pragma unroll
      for (int m = 0; m < S_M; ++m) {
        multiply_pair<ELEMENT>(scores[m][n], scores[m][n + 1], a[i % 2][m], b[i % 2][n / 2]);
      }
    }
  }
}

// Scores of the keys that this warp keeps: where two have sums over different columns, each gives the
// other half of the keys. By all threads of a team.
__device__ __forceinline__ void add_halves(const Block& block, const PartialScores& partial,
                                           Scores& scores) {
  if constexpr (QK_K == 1) {
    memcpy(scores, partial, sizeof(scores));
    return;
  }
  constexpr int COUNT = S_M * OWN * 4;
  float given[COUNT];
#pragma unroll
  for (int m = 0; m < S_M; ++m) {
#pragma unroll
    for (int n = 0; n < OWN; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float low = partial[m][n][i], high = partial[m][(n + OWN) % S_N][i];
        scores[m][n][i] = block.qk_k == 0 ? low : high;
        given[(m * OWN + n) * 4 + i] = block.qk_k == 0 ? high : low;
      }
    }
  }
  char* weights = block.weights() + WeightTile::place(block.team * TEAM_ROWS, 0);
  float* exchange = reinterpret_cast<float*>(weights) + block.warp / 2 * COUNT * 32 + block.lane;
  const auto give = [&] {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) exchange[i * 32] = given[i];
  };
  const auto take = [&] {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) (&scores[0][0][0])[i] += exchange[i * 32];
  };
  if (block.qk_k == 1) give();
  block.team_sync();
  if (block.qk_k == 0) {
    take();
    give();
  }
  block.team_sync();
  if (block.qk_k == 1) take();
}

// Scores of keys that are not there, or that a row does not see, count for nothing. Most tiles are
// `complete` and seen by everyone.
__device__ __forceinline__ void mask(const Block& block, const RequestKeys& keys, const Span& span,
                                     int first_row, int tile, bool complete, bool everyone_sees,
                                     Scores& scores) {
  if (!complete) {
#pragma unroll
    for (int n = 0; n < OWN; ++n) {
      const int token = block.score_token(n);
      const bool left = key_exists(block, keys.layout, span, tile, token);
      const bool right = key_exists(block, keys.layout, span, tile, token + 1);
#pragma unroll
      for (int m = 0; m < S_M; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (!left) scores[m][n][2 * half] = NO_KEY_LSE;
          if (!right) scores[m][n][2 * half + 1] = NO_KEY_LSE;
        }
      }
    }
  }
  if (SPARSE || everyone_sees) return;
  const int lane = fresh(block.lane);  // rarely needed: nothing is kept for it from tile to tile
#pragma unroll
  for (int m = 0; m < S_M; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + block.score_row(m, half) - block.lane / 4 + lane / 4;
      const int query = min(row / HEADS, keys.layout.tokens - 1);
      const Span seen = keys.span(query);
#pragma unroll
      for (int n = 0; n < OWN; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int place = tile * TOKENS + block.score_token(n) + i;
          bool sees = place >= seen.first && place < seen.end;
          if (TREE && sees) sees = keys.in_tree(query, place);
          if (!sees) scores[m][n][2 * half + i] = NO_KEY_LSE;
        }
      }
    }
  }
}

// Places that all queries see.
__device__ __forceinline__ Span seen_by_all(const RequestKeys& keys) {
  const Span first = keys.span(0), last = keys.span(keys.layout.tokens - 1);
  return {last.first, TREE ? min(first.end, max(0, keys.own(0))) : first.end};
}
