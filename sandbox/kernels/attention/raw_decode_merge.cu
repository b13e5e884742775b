// The parts of each row that was split, weighed by their LSEs; rows that were not are left alone. Few
// rows have THREADS_A_ROW = 128 threads each, many a warp, of which the idle ones soon make room.
#include "online_softmax.cuh"
#include "overlap.cuh"
#include "scalar.cuh"
#include "strides.cuh"

constexpr int COLUMNS = 4;  // of a thread, side by side
constexpr int CHUNKS = (LATENT + COLUMNS * THREADS_A_ROW - 1) / (COLUMNS * THREADS_A_ROW);
constexpr int IN_FLIGHT = CHUNKS == 1 ? 4 : 2;  // parts

extern "C" __global__ void __launch_bounds__(THREADS)
    decode_merge(const float* __restrict__ partials, const float* __restrict__ partial_lses,
                 const int* __restrict__ parts, long long all_rows, int row_count,
                 const float* __restrict__ sink, OUT* __restrict__ out,
                 const RequestStrides out_strides, float* __restrict__ out_lse,
                 const RequestStrides lse_strides, float from_natural) {
  wait_for_previous_kernel();
  const long long index =
      blockIdx.x * (long long)(THREADS / THREADS_A_ROW) + threadIdx.x / THREADS_A_ROW;
  if (index >= all_rows) return;
  const int sequence = int(index / row_count), row = int(index - (long long)sequence * row_count);
  const int* of_sequence = parts + 3LL * sequence;
  const int count = of_sequence[0], first = of_sequence[1], rest = of_sequence[2];
  if (count <= 1) return;
  const int first_column = threadIdx.x % THREADS_A_ROW * COLUMNS;

  float sums[CHUNKS][COLUMNS] = {}, total = 0.0f, top = NO_KEY_LSE;
  for (int i = 0; i < count; i += IN_FLIGHT) {
    float4 values[IN_FLIGHT][CHUNKS];
    float lses[IN_FLIGHT];
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
    const float before = top;
#pragma unroll
    for (int j = 0; j < IN_FLIGHT; ++j) top = fmaxf(top, lses[j]);
    const float shrink = expf(before - finite_top(top));
    total *= shrink;
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) sums[chunk][j] *= shrink;
    }
#pragma unroll
    for (int j = 0; j < IN_FLIGHT; ++j) {
      if (i + j < count) {
        const float weight = expf(lses[j] - finite_top(top));
        total += weight;
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
          sums[chunk][0] += weight * values[j][chunk].x;
          sums[chunk][1] += weight * values[j][chunk].y;
          sums[chunk][2] += weight * values[j][chunk].z;
          sums[chunk][3] += weight * values[j][chunk].w;
        }
      }
    }
  }

  const float lse = total == 0.0f ? NO_KEY_LSE : top + logf(total);
  const int request = sequence / SEQUENCES_A_REQUEST;
  const int query = sequence % SEQUENCES_A_REQUEST + row / HEADS, head = row % HEADS;
  float factor = total == 0.0f ? 0.0f : 1.0f / total;
  if (sink != nullptr) factor *= share_beside(sink[head], lse);
  OUT* to = out + out_strides(request, query, head) + first_column;
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; ++chunk) {
    constexpr int BYTES = COLUMNS * int(sizeof(OUT));
    const int column = chunk * THREADS_A_ROW * COLUMNS;
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) sums[chunk][j] *= factor;
    if (first_column + column < LATENT) {
      *reinterpret_cast<Vector<BYTES>*>(to + column) = pack<OUT, BYTES>(sums[chunk]);
    }
  }
  if (out_lse != nullptr && first_column == 0) {
    out_lse[lse_strides(request, query, head)] = lse * from_natural;
  }
}
