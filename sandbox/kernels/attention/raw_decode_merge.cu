// The parts of each row that was split, weighed by their LSEs; rows that were not are left alone. Few
// rows have a block each, whose TEAMS teams of THREADS_A_ROW threads take parts in turn and are merged
// in the end; many have a warp, of which the idle ones soon make room.
#include "online_softmax.cuh"
#include "overlap.cuh"
#include "scalar.cuh"
#include "strides.cuh"

constexpr int COLUMNS = 4;  // of a thread, side by side
constexpr int CHUNKS = (LATENT + COLUMNS * THREADS_A_ROW - 1) / (COLUMNS * THREADS_A_ROW);
constexpr int IN_FLIGHT = CHUNKS == 1 ? 4 : 2;  // parts
static_assert(TEAMS == 1 || THREADS == TEAMS * THREADS_A_ROW, "teams are of one row");

// The softmax of a thread's row and columns, as far as it has come.
struct State {
  float sums[CHUNKS][COLUMNS] = {};
  float total = 0.0f, top = NO_KEY_LSE;

  // Before parts with a larger LSE are added.
  __device__ __forceinline__ void raise(float lse) {
    const float before = top;
    top = fmaxf(top, lse);
    const float shrink = expf(before - finite_top(top));
    total *= shrink;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) sums[chunk][j] *= shrink;
    }
  }
};

// What the teams of a row have come to, in the state of the first.
__device__ __forceinline__ void merge_teams(State& state, int team) {
  if constexpr (TEAMS > 1) {
    __shared__ float tops[TEAMS], totals[TEAMS];
    __shared__ float4 sums[TEAMS > 1 ? TEAMS - 1 : 1][CHUNKS][THREADS_A_ROW];
    const int thread = threadIdx.x % THREADS_A_ROW;
    if (thread == 0) tops[team] = state.top, totals[team] = state.total;
    if (team > 0) {
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        const float(&from)[COLUMNS] = state.sums[chunk];
        sums[team - 1][chunk][thread] = make_float4(from[0], from[1], from[2], from[3]);
      }
    }
    __syncthreads();
    if (team > 0) return;
    float top = tops[0];
#pragma unroll
    for (int other = 1; other < TEAMS; ++other) top = fmaxf(top, tops[other]);
    state.raise(top);
#pragma unroll
    for (int other = 1; other < TEAMS; ++other) {
      const float weight = expf(tops[other] - finite_top(top));
      state.total += weight * totals[other];
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        const float4 from = sums[other - 1][chunk][thread];
        state.sums[chunk][0] += weight * from.x;
        state.sums[chunk][1] += weight * from.y;
        state.sums[chunk][2] += weight * from.z;
        state.sums[chunk][3] += weight * from.w;
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    decode_merge(const float* __restrict__ partials, const float* __restrict__ partial_lses,
                 const int* __restrict__ parts, long long all_rows, int row_count,
                 const float* __restrict__ sink, OUT* __restrict__ out,
                 const RequestStrides out_strides, float* __restrict__ out_lse,
                 const RequestStrides lse_strides, float from_natural) {
  wait_for_previous_kernel();
  const int team = TEAMS > 1 ? threadIdx.x / THREADS_A_ROW : 0;
  const long long index =
      TEAMS > 1 ? blockIdx.x
                : blockIdx.x * (long long)(THREADS / THREADS_A_ROW) + threadIdx.x / THREADS_A_ROW;
  if (index >= all_rows) return;
  const int sequence = int(index / row_count), row = int(index - (long long)sequence * row_count);
  const int* of_sequence = parts + 3LL * sequence;
  const int count = of_sequence[0], first = of_sequence[1], rest = of_sequence[2];
  if (count <= 1) return;
  const int first_column = threadIdx.x % THREADS_A_ROW * COLUMNS;

  State state;
  for (int i = team * IN_FLIGHT; i < count; i += TEAMS * IN_FLIGHT) {
    float4 values[IN_FLIGHT][CHUNKS];
    float lses[IN_FLIGHT], largest = NO_KEY_LSE;
#pragma unroll
    for (int j = 0; j < IN_FLIGHT; ++j) {
      lses[j] = NO_KEY_LSE;
      if (i + j < count) {
        const long long slot = i + j == 0 ? first : rest + i + j;
        const float* from = partials + (slot * row_count + row) * LATENT + first_column;
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
          const int column = chunk * THREADS_A_ROW * COLUMNS;
          if (first_column + column < LATENT) {
            values[j][chunk] = *reinterpret_cast<const float4*>(from + column);
          }
        }
        lses[j] = partial_lses[slot * row_count + row];
      }
    }
#pragma unroll
    for (int j = 0; j < IN_FLIGHT; ++j) largest = fmaxf(largest, lses[j]);
    state.raise(largest);
#pragma unroll
    for (int j = 0; j < IN_FLIGHT; ++j) {
      if (i + j < count) {
        const float weight = expf(lses[j] - finite_top(state.top));
        state.total += weight;
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
          state.sums[chunk][0] += weight * values[j][chunk].x;
          state.sums[chunk][1] += weight * values[j][chunk].y;
          state.sums[chunk][2] += weight * values[j][chunk].z;
          state.sums[chunk][3] += weight * values[j][chunk].w;
        }
      }
    }
  }
  merge_teams(state, team);
  if (team > 0) return;

  const float lse = state.total == 0.0f ? NO_KEY_LSE : state.top + logf(state.total);
  const int request = sequence / SEQUENCES_A_REQUEST;
  const int query = sequence % SEQUENCES_A_REQUEST + row / HEADS, head = row % HEADS;
  float factor = state.total == 0.0f ? 0.0f : 1.0f / state.total;
  if (sink != nullptr) factor *= share_beside(sink[head], lse);
  OUT* to = out + out_strides(request, query, head) + first_column;
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; ++chunk) {
    constexpr int BYTES = COLUMNS * int(sizeof(OUT));
    const int column = chunk * THREADS_A_ROW * COLUMNS;
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) state.sums[chunk][j] *= factor;
    if (first_column + column < LATENT) {
      *reinterpret_cast<Vector<BYTES>*>(to + column) = pack<OUT, BYTES>(state.sums[chunk]);
    }
  }
  if (out_lse != nullptr && first_column == 0) {
    out_lse[lse_strides(request, query, head)] = lse * from_natural;
  }
}
