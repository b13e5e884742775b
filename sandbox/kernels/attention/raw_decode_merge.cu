// The parts of each row that was split, weighed by their LSEs; rows that were not are left alone.
#include "online_softmax.cuh"
#include "overlap.cuh"
#include "scalar.cuh"
#include "strides.cuh"

constexpr int IN_FLIGHT = 4;

extern "C" __global__ void __launch_bounds__(THREADS)
    decode_merge(const float* __restrict__ partials, const float* __restrict__ partial_lses,
                 const int* __restrict__ parts, int row_count,
                 const float* __restrict__ sink, OUT* __restrict__ out,
                 const RequestStrides out_strides, float* __restrict__ out_lse,
                 const RequestStrides lse_strides, float from_natural) {
  wait_for_previous_kernel();
  const int sequence = blockIdx.x / row_count;
  const int row = blockIdx.x - sequence * row_count;
  const int* of_sequence = parts + 3LL * sequence;
  const int count = of_sequence[0], first = of_sequence[1], rest = of_sequence[2];
  if (count <= 1) return;
  const auto slot_row = [&](int index) {
    return (long long)(index == 0 ? first : rest + index) * row_count + row;
  };

  constexpr int COLUMNS = 4;
  for (int column = threadIdx.x * COLUMNS; column < LATENT; column += THREADS * COLUMNS) {
    float sums[COLUMNS] = {}, total = 0.0f, top = NO_KEY_LSE;
    for (int i = 0; i < count; i += IN_FLIGHT) {
      float4 values[IN_FLIGHT];
      float lses[IN_FLIGHT];
#pragma unroll
      for (int j = 0; j < IN_FLIGHT; ++j) {
        lses[j] = NO_KEY_LSE;
        if (i + j < count) {
          const long long from = slot_row(i + j);
          values[j] = *reinterpret_cast<const float4*>(partials + from * LATENT + column);
          lses[j] = partial_lses[from];
        }
      }
      const float before = top;
#pragma unroll
      for (int j = 0; j < IN_FLIGHT; ++j) top = fmaxf(top, lses[j]);
      const float shrink = expf(before - finite_top(top));
      total *= shrink;
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) sums[j] *= shrink;
#pragma unroll
      for (int j = 0; j < IN_FLIGHT; ++j) {
        if (i + j < count) {
          const float weight = expf(lses[j] - finite_top(top));
          total += weight;
          sums[0] += weight * values[j].x;
          sums[1] += weight * values[j].y;
          sums[2] += weight * values[j].z;
          sums[3] += weight * values[j].w;
        }
      }
    }
    const float lse = total == 0.0f ? NO_KEY_LSE : top + logf(total);
    const int request = sequence / SEQUENCES_A_REQUEST;
    const int query = sequence % SEQUENCES_A_REQUEST + row / HEADS, head = row % HEADS;
    float factor = total == 0.0f ? 0.0f : 1.0f / total;
    if (sink != nullptr) factor *= share_beside(sink[head], lse);
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) sums[j] *= factor;
    constexpr int BYTES = COLUMNS * int(sizeof(OUT));
    *reinterpret_cast<Vector<BYTES>*>(out + out_strides(request, query, head) + column) =
        pack<OUT, BYTES>(sums);
    if (out_lse != nullptr && column == 0) {
      out_lse[lse_strides(request, query, head)] = lse * from_natural;
    }
  }
}
