// FlashAttention-2 on tensor cores of sm_80 and newer. A block has BLOCK_Q queries of one head and
// walks over tiles of keys; a warp has 16 * M_TILES of the queries and all keys of a tile, so that
// scores become the weights of values in the registers where they are.
#include "prefill_feed.cuh"
#include "prefill_results.cuh"
#include "prefill_scores.cuh"
#include "prefill_softmax.cuh"
#include "prefill_work.cuh"
#include "registers.cuh"

struct Strides {  // bytes of the inputs, elements of the outputs
  long long token, head;
};
struct PrefillStrides {
  Strides q, k, v, out, lse;
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    prefill_mma(const ELEMENT* q, const ELEMENT* k, const ELEMENT* v, const int* cu_seqlens_q,
                const int* cu_seqlens_k, RESULT* out, float* out_lse, const PrefillStrides strides,
                int requests, long long q_rows, long long k_rows, int heads, int group_heads,
                int tiles, float score_scale, float lse_factor, const float* q_descale,
                const float* k_descale, const float* v_descale) {
  extern __shared__ __align__(1024) char shared[];
  Work& work = *reinterpret_cast<Work*>(shared + WORK_AT);
  Feed feed;
  int left, seen;  // keys that are left for the block, and for the last query of the warp
  Softmax softmax;
  Sums sums = {};
  const int warp_row = threadIdx.x / 32 * WARP_ROWS;
  {
    // A group of heads is done before the next, so that its keys and values stay in L2; in it all
    // heads' longest tiles come first.
    const int group = blockIdx.x / (tiles * group_heads);
    const int place = blockIdx.x - group * tiles * group_heads;
    const int heads_here = min(heads - group * group_heads, group_heads);
    const int tile = place / heads_here;
    Work found = Requests{cu_seqlens_q, cu_seqlens_k, requests, tiles, q_rows, k_rows}.work(tile);
    if (found.queries == 0) return;
    found.head = group * group_heads + place - tile * heads_here;
    seen = warp_row < found.queries ? found.seen(warp_row + WARP_ROWS - 1) : 0;
    const auto rows = [&](const ELEMENT* array, const Strides& by, long long first) {
      return reinterpret_cast<const char*>(array) + first * by.token + found.head * by.head;
    };
    feed.shared = shared;
    feed.next_keys = KeyCopy::own(rows(k, strides.k, found.first_key), strides.k.token);
    feed.next_values = ValueCopy::own(rows(v, strides.v, found.first_key), strides.v.token);
    feed.key_stride = strides.k.token;
    feed.value_stride = strides.v.token;
    left = found.keys;
    if (left > 0) {
      feed.start(QueryCopy::own(rows(q, strides.q, found.first_query), strides.q.token),
                 strides.q.token, found.queries, left);
    }
    if (threadIdx.x == 0) work = found;  // what the loop rarely needs has no register
  }
  softmax.start(score_scale);
  if constexpr (CODES) softmax.scale *= __ldg(q_descale) * __ldg(k_descale);
  __syncthreads();

  const int query_place = kept(warp_row * PANEL_BYTES + lane_place<DOWN_FIRST>());
  const int key_place = lane_place<RIGHT_FIRST>();
#pragma unroll 1
  for (; left > 0; left -= BLOCK_K, seen -= BLOCK_K) {
    Scores scores;
    Weights weights;
    feed.keys(left);
    if (seen > 0) {
      const int here_query = fresh(query_place), here_key = fresh(key_place);
      if (seen <= BLOCK_K / 2) {
        score<BLOCK_K / 2>(scores, shared, feed.key_tile(left), here_query, here_key);
      } else {
        score<BLOCK_K>(scores, shared, feed.key_tile(left), here_query, here_key);
      }
      RowMaxima top;
      find_maxima(top, scores);  // ahead of the branch, under way of the last products
      if (seen < BLOCK_K + (CAUSAL ? WARP_ROWS - 1 : 0)) {
        hide_unseen(scores, work, work.keys - left);
        find_maxima(top, scores);
      }
      softmax.raise(top, sums);
      softmax.weigh(weights, scores);
    }
    feed.ahead(left);
    feed.values(left);
    if (seen > 0) {
      const int value_place = fresh(query_place) % (16 * PANEL_BYTES);
      if (seen <= BLOCK_K / 2) {
        add_values<BLOCK_K / 2>(sums, weights, feed.value_tile(left), value_place);
      } else {
        add_values<BLOCK_K>(sums, weights, feed.value_tile(left), value_place);
      }
    }
  }

  if constexpr (STAGED) __syncwarp();  // the warp has read its queries
  const float value_scale = CODES ? __ldg(v_descale) : 1.0f;
  out += work.first_query * strides.out.token + work.head * strides.out.head;
  out_lse += work.first_query * strides.lse.token + work.head * strides.lse.head;
#pragma unroll
  for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float total = softmax.whole_total(m, half);
      const int row = own_row(m, half);
      const bool empty = total == 0.0f;
      const float factor = empty ? 0.0f : __fdividef(value_scale, total);
      if constexpr (STAGED) {
        stage_row(shared, sums, m, half, factor);
      } else if (row < work.queries) {
        store_row(out + row * strides.out.token, sums, m, half, factor);
      }
      if (HAS_LSE && row < work.queries && threadIdx.x % 4 == 0) {
        out_lse[row * strides.lse.token] =
            empty ? NEGATIVE_INFINITY : (softmax.reference[m][half] + log2f(total)) * lse_factor;
      }
    }
  }
  if constexpr (STAGED) store_staged(out, strides.out.token, shared, work.queries);
}
