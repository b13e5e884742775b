// A warp KEYS neighbouring keys of a query, which stay in its registers while it goes through the
// heads: each score is computed again, and what the softmax made of it is added up.
#include "keys.cuh"
#include "latent_row.cuh"
#include "online_softmax.cuh"
#include "strides.cuh"

constexpr int THREADS = WARPS * 32;

extern "C" __global__ void __launch_bounds__(THREADS)
    write_key_mass(const QUERY* q, const char* cache, const int* block_table, const int* seq_lens,
                   const int* tree_mask, const int* indices, const KeyLayout layout,
                   const RequestStrides q_strides, float softmax_scale, const float* q_descale,
                   const float* k_scale, const float* lse, const RequestStrides lse_strides,
                   float to_natural, const float* sink, float* mass,
                   const TokenStrides mass_strides, int places, int heads) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int groups = (places + WARPS * KEYS - 1) / (WARPS * KEYS);
  const int query = blockIdx.x / groups % layout.tokens;
  const int request = blockIdx.x / groups / layout.tokens;
  const long long first = (blockIdx.x % groups * (long long)WARPS + warp) * KEYS;
  const RequestKeys keys({block_table, seq_lens, tree_mask, indices, layout}, request);
  const float scale = softmax_scale * descale_of(q_descale);
  const float row_scale = descale_of(k_scale);

  Row rows[KEYS];
  bool seen[KEYS], any = false;
#pragma unroll
  for (int k = 0; k < KEYS; ++k) {
    const long long place = first + k;
    long long offset = NO_ROW;
    if (place < places && keys.sees(query, int(place))) offset = keys.row_offset(query, int(place));
    seen[k] = offset != NO_ROW;
    if (seen[k]) rows[k] = key_row(cache + offset, row_scale);
    any = any || seen[k];
  }

  float masses[KEYS] = {};
#pragma unroll 1
  for (int head = 0; any && head < heads; ++head) {
    const Row row = query_row(q + q_strides(request, query, head));
    const float found = lse[lse_strides(request, query, head)] * to_natural;
    const float share = sink == nullptr ? 1.0f : share_beside(sink[head], found);
#pragma unroll
    for (int k = 0; k < KEYS; ++k) {
      const float score = dot(row, rows[k]) * scale;
      if (found != NO_KEY_LSE) masses[k] += expf(score - found) * share;
    }
  }

  float* to = mass + mass_strides(request, query);
#pragma unroll
  for (int k = 0; k < KEYS; ++k) {
    if (lane == k && first + k < places) to[first + k] = seen[k] ? masses[k] : 0.0f;
  }
}
