// Weighted values, and how they leave the block.
#pragma once
#include "decode_softmax.cuh"

struct Results {
  OUT* out;
  const RequestStrides& out_strides;
  float* lse;  // or null
  const RequestStrides& lse_strides;
  float from_natural;
  const float* sink;  // or null
  float* partials;    // [slot, row of a sequence, LATENT]
  float* partial_lses;
  int* parts;  // [sequence, 3]
};

using Sums = float[O_M][2 * UNITS][4];

__device__ __forceinline__ void clear(Sums& sums) {
#pragma unroll
  for (int m = 0; m < O_M; ++m) {
#pragma unroll
    for (int n = 0; n < 2 * UNITS; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[m][n][i] = 0.0f;
    }
  }
}

// Weights times values onto the sums of this warp's columns, shrunk where a row has a new largest
// score.
__device__ __forceinline__ void add_values(const Block& block, const char* keys, Sums& sums) {
  float shrink[O_M][2];
  bool changed = false;
#pragma unroll
  for (int m = 0; m < O_M; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      shrink[m][half] =
          block.shrinks()[block.team * TEAM_ROWS + m * 16 + half * 8 + block.lane / 4];
      changed |= shrink[m][half] != 1.0f;
    }
  }
  if (__any_sync(ALL_LANES, changed)) {
#pragma unroll
    for (int m = 0; m < O_M; ++m) {
#pragma unroll
      for (int n = 0; n < 2 * UNITS; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[m][n][i] *= shrink[m][i / 2];
      }
    }
  }
  const int first_unit = block.warp * UNITS, units = min(UNITS, COLUMN_UNITS - first_unit);
  const auto weight_lane =
      left_lane<WeightTile>(block.weights(), block.lane, block.team * TEAM_ROWS, 0);
  const auto value_lane = left_lane<KeyTile>(keys, block.lane, 0, 0);
  SharedAddress values_at[UNITS];
#pragma unroll
  for (int unit = 0; unit < UNITS; ++unit) {
    values_at[unit] = fresh(value_lane.at(0, 2 * (first_unit + unit)));
  }
#pragma unroll
  for (int step = 0; step < TOKENS / 16; ++step) {
    unsigned int a[O_M][4];
#pragma unroll
    for (int m = 0; m < O_M; ++m) ldmatrix(a[m], weight_lane.at(m * 16, 2 * step));
#pragma unroll
    for (int unit = 0; unit < UNITS; ++unit) {
      if (COLUMN_UNITS % (UNITS * TEAM_WARPS) != 0 && unit >= units) break;
      unsigned int v[4];
      ldmatrix_trans(v, values_at[unit] + value_lane.further(step * 16, 0));
#pragma unroll
      for (int m = 0; m < O_M; ++m) {
        multiply_pair<ELEMENT>(sums[m][2 * unit], sums[m][2 * unit + 1], a[m], v);
      }
    }
  }
}

__device__ __forceinline__ void store(float* to, const float (&values)[8]) {
  float4* pieces = reinterpret_cast<float4*>(to);
  pieces[0] = make_float4(values[0], values[1], values[2], values[3]);
  pieces[1] = make_float4(values[4], values[5], values[6], values[7]);
}

template <class Element>
__device__ __forceinline__ void store(Element* to, const float (&values)[8]) {
  *reinterpret_cast<uint4*>(to) = pack<Element, 16>(values);
}

// LSEs of all rows to where those of a whole or a part belong, and to shared memory where `shrinks`
// was, which a barrier must follow.
__device__ __forceinline__ void write_lses(const Block& block, const Results& results,
                                           const AllSequences& sequences, const WorkItem& item,
                                           int first_row, int row_count, const Softmax& softmax,
                                           float scale) {
  if (block.group() != 0 || block.lane % 4 != 0) return;
#pragma unroll
  for (int m = 0; m < S_M; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = block.score_row(m, half);
      const float total = sum_of_row(block, row);
      const float lse =
          total == 0.0f ? NO_KEY_LSE : (softmax.top[m][half] * scale + log2f(total)) * LN_2;
      block.shrinks()[row] = lse;
      if (first_row + row >= row_count) continue;
      if (item.parts.count > 1) {
        const long long slot = item.parts.slot(item.index);
        results.partial_lses[slot * row_count + first_row + row] = lse;
      } else if (results.lse != nullptr) {
        const Row to(sequences, item.sequence, first_row + row);
        results.lse[results.lse_strides(to.request, to.query, to.head)] =
            lse * results.from_natural;
      }
    }
  }
}

// Sums over weights, and LSEs, to where a whole or a part belongs. They go through shared memory,
// where queries and keys are no longer needed, as many rows at a time as there is room for.
__device__ __forceinline__ void write_results(const Block& block, const Results& results,
                                              const AllSequences& sequences, const WorkItem& item,
                                              int first_row, int row_count, const Softmax& softmax,
                                              const Sums& sums, float scale, float value_scale) {
  constexpr int PIECES = LATENT / 8;
  constexpr int STRIDE = 16 * COLUMN_UNITS + 8;
  constexpr int ROOM = AT_WEIGHTS / (TEAMS * 16 * STRIDE * 4);
  constexpr int AT_ONCE = ROOM < O_M ? ROOM : O_M;
  static_assert(AT_ONCE > 0, "no room for 16 rows of results");
  float* const passing = reinterpret_cast<float*>(block.shared);
  softmax.publish_sums(block);
  __syncthreads();
  write_lses(block, results, sequences, item, first_row, row_count, softmax, scale);
#pragma unroll
  for (int first_m = 0; first_m < O_M; first_m += AT_ONCE) {
#pragma unroll
    for (int m = first_m; m < O_M && m < first_m + AT_ONCE; ++m) {
#pragma unroll
      for (int n = 0; n < 2 * UNITS; ++n) {
        const int column = (block.warp * UNITS * 2 + n) * 8 + block.lane % 4 * 2;
        if (column >= 16 * COLUMN_UNITS) break;
        const int row = (block.team * AT_ONCE + m - first_m) * 16 + block.lane / 4;
        float* to = passing + row * STRIDE + column;
        *reinterpret_cast<float2*>(to) = make_float2(sums[m][n][0], sums[m][n][1]);
        *reinterpret_cast<float2*>(to + 8 * STRIDE) = make_float2(sums[m][n][2], sums[m][n][3]);
      }
    }
    __syncthreads();
#pragma unroll 1
    for (int i = block.thread; i < TEAMS * AT_ONCE * 16 * PIECES; i += THREADS) {
      const int passed = i / PIECES, column = i % PIECES * 8;
      const int team = passed / (AT_ONCE * 16), of_team = first_m * 16 + passed % (AT_ONCE * 16);
      const int row = team * TEAM_ROWS + of_team;
      if (of_team >= TEAM_ROWS || first_row + row >= row_count) continue;
      const Row to(sequences, item.sequence, first_row + row);
      const float total = sum_of_row(block, row);
      float factor = value_scale / total;
      if (item.parts.count == 1 && results.sink != nullptr) {
        factor *= share_beside(results.sink[to.head], block.shrinks()[row]);
      }
      float values[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float sum = passing[passed * STRIDE + column + j];
        values[j] = total == 0.0f ? 0.0f : sum * factor;
      }
      if (item.parts.count > 1) {
        const long long slot = item.parts.slot(item.index);
        store(results.partials + (slot * row_count + first_row + row) * LATENT + column, values);
      } else {
        store(results.out + results.out_strides(to.request, to.query, to.head) + column, values);
      }
    }
    __syncthreads();
  }
}
