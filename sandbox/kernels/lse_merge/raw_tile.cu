// A block a tile of rows: each row's weights are computed once, by one thread, into shared memory,
// while all threads have their vectors on the way. A tile is several tokens high where an LSE runs
// along tokens, so that whole sectors of it are used.
#include "merge.cuh"
#include "overlap.cuh"

constexpr int ROWS = TILE_TOKENS * TILE_HEADS;
constexpr int IN_BYTES = ELEMENTS * int(sizeof(ELEMENT));
constexpr int OUT_BYTES = ELEMENTS * int(sizeof(RESULT));
constexpr int VECTORS = HEAD_DIM / ELEMENTS;
constexpr int TILE = ROWS * VECTORS;
constexpr int HEAD_TILES = (HEADS + TILE_HEADS - 1) / TILE_HEADS;

extern "C" __global__ void __launch_bounds__(THREADS)
    lse_merge_tile(const ELEMENT* prefix, const float* prefix_lse, const ELEMENT* suffix,
                   const float* suffix_lse, RESULT* out, float* out_lse,
                   const MergeStrides strides, long long tokens, float to_natural,
                   float from_natural, const float* output_scale, long long context_tokens) {
  wait_for_previous_kernel();
  __shared__ MergeWeights shared_weights[ROWS];
  __shared__ float shared_inverse;
  const long long first_token = blockIdx.x / HEAD_TILES * (long long)TILE_TOKENS;
  const int first_head = blockIdx.x % HEAD_TILES * TILE_HEADS;
  const int tile_tokens = int(min(tokens - first_token, (long long)TILE_TOKENS));
  const int tile_heads = min(HEADS - first_head, TILE_HEADS);
  prefix += strides.prefix(first_token, first_head);
  suffix += strides.suffix(first_token, first_head);
  out += strides.out(first_token, first_head);
  const long long context = context_tokens - first_token;  // tokens from here on with a prefix

#pragma unroll 1
  for (int chunk = 0; chunk < TILE; chunk += THREADS * IN_FLIGHT) {
    const int first = chunk + threadIdx.x;
    Vector<IN_BYTES> left[IN_FLIGHT], right[IN_FLIGHT];
    bool mine[IN_FLIGHT];
    int rows[IN_FLIGHT];
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      const int vector = first + THREADS * i;
      rows[i] = vector / VECTORS;
      const int token = rows[i] / TILE_HEADS, head = rows[i] % TILE_HEADS;
      mine[i] = token < tile_tokens && head < tile_heads;
      if (mine[i]) {
        const int column = (vector - rows[i] * VECTORS) * ELEMENTS;
        left[i] = Vector<IN_BYTES>{};
        if (!CONTEXT || token < context) {
          left[i] = stream_in<IN_BYTES>(prefix + strides.prefix(token, head) + column);
        }
        right[i] = stream_in<IN_BYTES>(suffix + strides.suffix(token, head) + column);
      }
    }
    if (chunk == 0) {
      for (int row = threadIdx.x; row < ROWS; row += THREADS) {
        const int token = row % TILE_TOKENS, head = row / TILE_TOKENS;
        if (token < tile_tokens && head < tile_heads) {
          const long long t = first_token + token;
          const int h = first_head + head;
          const bool has_prefix = !CONTEXT || token < context;
          const MergeWeights weights =
              weigh(has_prefix ? prefix_lse[strides.prefix_lse(t, h)] : NO_LSE,
                    suffix_lse[strides.suffix_lse(t, h)], to_natural, from_natural);
          shared_weights[token * TILE_HEADS + head] = weights;
          if (out_lse != nullptr) out_lse[strides.out_lse(t, h)] = weights.lse;
        }
      }
      if (IS_CODE<RESULT> && threadIdx.x == THREADS - 1) {
        shared_inverse = 1.0f / load_scale<RESULT>(output_scale);
      }
      __syncthreads();
    }
    const float inverse = IS_CODE<RESULT> ? shared_inverse : 1.0f;
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      if (mine[i]) {
        const int token = rows[i] / TILE_HEADS, head = rows[i] % TILE_HEADS;
        const int column = (first + THREADS * i - rows[i] * VECTORS) * ELEMENTS;
        store_once<OUT_BYTES>(out + strides.out(token, head) + column,
                              merged<ELEMENT, RESULT, ELEMENTS>(shared_weights[rows[i]], left[i],
                                                                right[i], inverse));
      }
    }
  }
}
