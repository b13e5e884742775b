// A block a query and head, a warp a key at a time: a row is read once, for its score and for its
// value. The warps' sums meet in shared memory in the end.
#include "keys.cuh"
#include "latent_row.cuh"
#include "online_softmax.cuh"
#include "strides.cuh"

constexpr int THREADS = WARPS * 32;

extern "C" __global__ void __launch_bounds__(THREADS)
    decode_attention_element(const QUERY* q, const char* cache, const int* block_table,
                             const int* seq_lens, const int* tree_mask, const int* indices,
                             const KeyLayout layout, const RequestStrides q_strides,
                             float softmax_scale, const float* q_descale, const float* k_scale,
                             OUT* out, const RequestStrides out_strides, float* out_lse,
                             const RequestStrides lse_strides, float from_natural,
                             const float* sink, int heads) {
  __shared__ float sums[WARPS][LATENT];
  __shared__ float tops[WARPS], totals[WARPS];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int head = blockIdx.x % heads;
  const int query = blockIdx.x / heads % layout.tokens;
  const int request = blockIdx.x / heads / layout.tokens;
  const RequestKeys keys({block_table, seq_lens, tree_mask, indices, layout}, request);
  const float scale = softmax_scale * descale_of(q_descale);
  const float row_scale = descale_of(k_scale);
  const Row query_values = query_row(q + q_strides(request, query, head));

  OnlineSoftmax softmax;
  WarpRow<LATENT, COUNT> sum;
  const Span span = keys.span(query);
#pragma unroll 1
  for (long long place = span.first + warp; place < span.end; place += WARPS) {
    if (!keys.in_tree(query, int(place))) continue;
    const long long offset = keys.row_offset(query, int(place));
    if (offset == NO_ROW) continue;
    const Row key = key_row(cache + offset, row_scale);
    float factor;
    const float weight = softmax.next(dot(query_values, key) * scale, factor);
    sum.add(factor, weight, key);
  }

  sum.each([&](int column, const float(&values)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) sums[warp][column + i] = values[i];
  });
  if (lane == 0) {
    tops[warp] = softmax.top;
    totals[warp] = softmax.total;
  }
  __syncthreads();

  OnlineSoftmax all;
  float factors[WARPS];
#pragma unroll
  for (int w = 0; w < WARPS; ++w) all.top = fmaxf(all.top, tops[w]);
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    factors[w] = expf(tops[w] - finite_top(all.top));
    all.total += totals[w] * factors[w];
  }
  const float lse = all.lse();
  float share = all.inverse();
  if (sink != nullptr && share != 0.0f) share *= share_beside(sink[head], lse);
  out += out_strides(request, query, head);
  for (int column = threadIdx.x; column < LATENT; column += THREADS) {
    float value = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) value += factors[w] * sums[w][column];
    out[column] = from_float<OUT>(value * share);
  }
  if (threadIdx.x == 0 && out_lse != nullptr) {
    out_lse[lse_strides(request, query, head)] = lse * from_natural;
  }
}
