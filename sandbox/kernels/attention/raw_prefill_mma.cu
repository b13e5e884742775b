// FlashAttention-2 on tensor cores of sm_80 and newer. A block has BLOCK_Q queries of one head and
// walks over tiles of keys; a warp has 16 * M_TILES of the queries and all keys of a tile, so that
// scores become the weights of values in the registers where they are.
#include "scalar.cuh"
#include "tile.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int WARP_ROWS = 16 * M_TILES;
constexpr int BLOCK_Q = WARPS * WARP_ROWS;
constexpr bool CODES = sizeof(ELEMENT) == 1;
using Number = MultipliedAs<ELEMENT>::type;

using QueryTile = Tile<BLOCK_Q, QK_DIM>;
using KeyTile = Tile<BLOCK_K, QK_DIM>;
using ValueTile = Tile<BLOCK_K, V_DIM>;

using QueryCopy = TileCopy<ELEMENT, BLOCK_Q, QK_DIM, THREADS>;
using KeyCopy = TileCopy<ELEMENT, BLOCK_K, QK_DIM, THREADS>;
using ValueCopy = TileCopy<ELEMENT, BLOCK_K, V_DIM, THREADS>;

constexpr int KEYS_AT = QueryTile::BYTES;
constexpr int VALUES_AT = KEYS_AT + K_STAGES * KeyTile::BYTES;
constexpr int WAITING_KEYS_AT = VALUES_AT + V_STAGES * ValueTile::BYTES;
constexpr int WAITING_VALUES_AT = WAITING_KEYS_AT + KeyCopy::WAITING_BYTES;
constexpr int WORK_AT = WAITING_VALUES_AT + ValueCopy::WAITING_BYTES;
constexpr int WORK_BYTES = 32;
static_assert(SHARED_BYTES == WORK_AT + WORK_BYTES, "as raw_prefill_mma.py has it");

using Scores = float[M_TILES][BLOCK_K / 8][4];
using Sums = float[M_TILES][ValueTile::PADDED / 8][4];
using Weights = unsigned int[BLOCK_K / 16][M_TILES][4];

struct Strides {  // bytes of the inputs, elements of the outputs
  long long token, head;
};
struct PrefillStrides {
  Strides q, k, v, out, lse;
};

__device__ __forceinline__ float exp2_fast(float x) {
#ifndef SANDBOX_HOST
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}

#define NEGATIVE_INFINITY __int_as_float(0xff800000)

__device__ __forceinline__ unsigned int pack_pair(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  unsigned int bits;
  memcpy(&bits, &pair, sizeof(bits));
  return bits;
}
__device__ __forceinline__ unsigned int pack_pair(float low, float high, __half) {
  const __half2 pair = __floats2half2_rn(low, high);
  unsigned int bits;
  memcpy(&bits, &pair, sizeof(bits));
  return bits;
}

// The value itself, which the compiler then keeps in a register instead of deriving it each time.
__device__ __forceinline__ int kept(int value) {
  return __shfl_sync(0xffffffffu, value, threadIdx.x % 32);
}

// The value itself, from which nothing is derived ahead of this place.
__device__ __forceinline__ int fresh(int value) {
#ifndef SANDBOX_HOST
  asm volatile("" : "+r"(value));
#endif
  return value;
}

// A block's queries of one head, and the keys that they see: query i of the block the first
// `first_seen + i * CAUSAL` of `keys`.
struct Work {
  long long first_query, first_key;
  int head, queries, keys, first_seen;

  __device__ __forceinline__ int seen(int row) const {
    return min(CAUSAL ? first_seen + row : first_seen, keys);
  }
};

static_assert(sizeof(Work) == WORK_BYTES, "as it lies in shared memory");

// The request of a tile of queries. Request r has tiles from first_row(r) / BLOCK_Q + r on, at
// least as many as it needs; the rows that no request owns are those of one more, without keys.
struct Requests {
  const int* cu_seqlens_q;
  const int* cu_seqlens_k;
  int count, tiles;
  long long q_rows, k_rows;

  __device__ __forceinline__ long long first_row(int request) const {
    if (request > count) return q_rows;
    return min(max((long long)__ldg(cu_seqlens_q + request), 0LL), q_rows);
  }

  __device__ __forceinline__ int first_tile(int request) const {
    return request > count ? tiles : int(first_row(request) / BLOCK_Q) + request;
  }

  // All lanes of a warp together: each looks at one of 32 requests, which narrows the range.
  __device__ __forceinline__ int of_tile(int tile) const {
    int first = 0, end = count + 1;
    while (end - first > 1) {
      const int step = (end - first + 31) / 32;
      const int request = first + int(threadIdx.x % 32) * step;
      const unsigned int starts =
          __ballot_sync(0xffffffffu, request < end && first_tile(request) <= tile);
      first += max(__popc(starts) - 1, 0) * step;
      end = min(first + step, end);
    }
    return first;
  }

  // Tiles that see most keys come first.
  __device__ __forceinline__ Work work(int tile) const {
    const int request = of_tile(tile);
    const long long first = first_row(request), rows = first_row(request + 1) - first;
    const long long row = (long long)(first_tile(request + 1) - 1 - tile) * BLOCK_Q;
    Work work;
    work.first_query = first + row;
    work.queries = int(min(max(rows - row, 0LL), (long long)BLOCK_Q));
    work.first_key = work.keys = work.first_seen = 0;
    if (request < count && work.queries > 0) {
      const long long end = min((long long)__ldg(cu_seqlens_k + request + 1), k_rows);
      work.first_key = max((long long)__ldg(cu_seqlens_k + request), 0LL);
      const int keys = int(max(end - work.first_key, 0LL));
      work.keys = keys;
      work.first_seen = keys;
      if (CAUSAL) {
        const long long seen = keys - rows + row + 1;
        work.first_seen = int(max(seen, -(long long)BLOCK_Q));
        work.keys = int(min(max(seen + work.queries - 1, 0LL), (long long)keys));
      }
    }
    return work;
  }
};

// Keeps tiles of keys and values coming. `keys`, `ahead` and `values` are called by turns with the
// number of keys left. When `keys` or `values` returns, its first tile of these is there for all.
struct Feed {
  char* shared;
  const char* next_keys;
  const char* next_values;
  long long key_stride, value_stride;

  static __device__ __forceinline__ int stage(int left) { return (left - 1) / BLOCK_K % 2; }
  __device__ __forceinline__ char* key_tile(int left) const {
    return shared + KEYS_AT + (K_STAGES == 2 ? stage(left) * KeyTile::BYTES : 0);
  }
  __device__ __forceinline__ char* value_tile(int left) const {
    return shared + VALUES_AT + (V_STAGES == 2 ? stage(left) * ValueTile::BYTES : 0);
  }

  __device__ __forceinline__ void begin_keys(int left) {
    if (left > 0) {
      KeyCopy::begin(key_tile(left), shared + WAITING_KEYS_AT, next_keys, key_stride, left);
      next_keys += BLOCK_K * key_stride;
    }
  }
  __device__ __forceinline__ void begin_values(int left) {
    if (left > 0) {
      ValueCopy::begin(value_tile(left), shared + WAITING_VALUES_AT, next_values, value_stride,
                       left);
      next_values += BLOCK_K * value_stride;
    }
  }

  __device__ __forceinline__ void start(const char* queries, long long stride, int rows, int left) {
    if constexpr (CODES) {
      begin_keys(left);
      cp_async_commit();
      begin_values(left);
      cp_async_commit();
      QueryCopy::at_once(shared, queries, stride, rows);
    } else {
      QueryCopy::begin(shared, nullptr, queries, stride, rows);
      begin_keys(left);
      if (V_STAGES == 2) begin_values(left);
      cp_async_commit();
    }
  }

  __device__ __forceinline__ void keys(int left) {
    if constexpr (CODES) {  // they wait where no other thread looks, so the next may come at once
      cp_async_wait<1>();
      KeyCopy::finish(key_tile(left), shared + WAITING_KEYS_AT);
      begin_keys(left - BLOCK_K);
      cp_async_commit();
      __syncthreads();
    } else {
      cp_async_wait<0>();
      __syncthreads();
      if (V_STAGES == 1) {
        begin_values(left);
        cp_async_commit();
      }
    }
  }

  // What has room for a tile more. After the scores, as it would stand in the way of their products.
  __device__ __forceinline__ void ahead(int left) {
    if (CODES) return;
    if (K_STAGES == 2) begin_keys(left - BLOCK_K);
    if (V_STAGES == 2) begin_values(left - BLOCK_K);
    if (K_STAGES == 2 || V_STAGES == 2) cp_async_commit();
  }

  __device__ __forceinline__ void values(int left) {
    if constexpr (CODES) {
      cp_async_wait<1>();
      ValueCopy::finish(value_tile(left), shared + WAITING_VALUES_AT);
      begin_values(left - BLOCK_K);
      cp_async_commit();
      __syncthreads();
    } else if constexpr (K_STAGES == 1 || V_STAGES == 1) {
      if (V_STAGES == 1) cp_async_wait<K_STAGES - 1>();
      __syncthreads();
      if (K_STAGES == 1) {
        begin_keys(left - BLOCK_K);
        cp_async_commit();
      }
    }
  }
};

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

// Row of the block that a thread's elements 2 * half and 2 * half + 1 belong to.
__device__ __forceinline__ int own_row(int m, int half) {
  return int(threadIdx.x / 32) * WARP_ROWS + m * 16 + half * 8 + int(threadIdx.x % 32) / 4;
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

using RowMaxima = float[M_TILES][2];

// Of the thread's own columns.
__device__ __forceinline__ void find_maxima(RowMaxima& top, const Scores& scores) {
#pragma unroll
  for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float most = fmaxf(scores[m][0][half * 2], scores[m][0][half * 2 + 1]);
#pragma unroll
      for (int n = 1; n < BLOCK_K / 8; ++n) {
        most = fmaxf(most, fmaxf(scores[m][n][half * 2], scores[m][n][half * 2 + 1]));
      }
      top[m][half] = most;
    }
  }
}

// A row's weights are 2 ** (score * scale - reference). The reference is not always the largest
// scaled score: it follows only when one is larger by more than SLACK, which no sum overflows for
// and which spares most tiles the exchange between lanes and the scaling of sums.
constexpr float SLACK = 8.0f;

struct Softmax {
  float scale;
  float reference[M_TILES][2];
  float total[M_TILES][2];  // of the thread's own columns

  __device__ __forceinline__ void start(float by) {
    scale = by;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
      reference[m][0] = reference[m][1] = NEGATIVE_INFINITY;
      total[m][0] = total[m][1] = 0.0f;
    }
  }

  __device__ __forceinline__ void raise(const RowMaxima& top, Sums& sums) {
    bool higher = false;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        higher |= fmaf(top[m][half], scale, -reference[m][half]) > SLACK;
      }
    }
    if (!__any_sync(0xffffffffu, higher)) return;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float most = top[m][half];
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
        most = fmaxf(most * scale, reference[m][half]);
        const bool none = most == NEGATIVE_INFINITY;
        const float factor = none ? 1.0f : exp2_fast(reference[m][half] - most);
        reference[m][half] = most;
        total[m][half] *= factor;
#pragma unroll
        for (int n = 0; n < ValueTile::PADDED / 8; ++n) {
          sums[m][n][half * 2] *= factor;
          sums[m][n][half * 2 + 1] *= factor;
        }
      }
    }
  }

  // Register i of the weights of 16 keys, as mma wants A.
  __device__ __forceinline__ unsigned int weigh(const Scores& scores, int keys, int m, int i) {
    const int half = i % 2;
    const float(&pair)[4] = scores[m][keys * 2 + i / 2];
    const float from = reference[m][half] == NEGATIVE_INFINITY ? 0.0f : reference[m][half];
    const float low = exp2_fast(fmaf(pair[half * 2], scale, -from));
    const float high = exp2_fast(fmaf(pair[half * 2 + 1], scale, -from));
    total[m][half] += low + high;
    return pack_pair(low, high, Number());
  }

  __device__ __forceinline__ void weigh(Weights& weights, const Scores& scores) {
#pragma unroll
    for (int step = 0; step < BLOCK_K / 16; ++step) {
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) weights[step][m][i] = weigh(scores, step, m, i);
      }
    }
  }

  __device__ __forceinline__ float whole_total(int m, int half) const {
    float sum = total[m][half];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    return sum + __shfl_xor_sync(0xffffffffu, sum, 2);
  }
};

// Adds the weighted values of the first Keys of a tile.
template <int Keys>
__device__ __forceinline__ void add_values(Sums& sums, const Weights& weights, const char* values,
                                           int value_place) {
#pragma unroll
  for (int step = 0; step < Keys / 16; ++step) {
#pragma unroll
    for (int block = 0; block < ValueTile::PADDED / 16; ++block) {
      unsigned int b[4];
      ldmatrix_trans(b, ValueTile::block(values, value_place, step, block));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const unsigned int half[2] = {b[2 * i], b[2 * i + 1]};
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
          float(&sum)[4] = sums[m][2 * block + i];
          mma_m16n8k16<Number>(sum, weights[step][m], half, sum);
        }
      }
    }
  }
}

constexpr int PAIR_BYTES = 2 * int(sizeof(RESULT));

// Rows of the result by columns as the sums lie in registers.
__device__ __forceinline__ void store_row(RESULT* out, const Sums& sums, int m, int half,
                                          float factor) {
#pragma unroll
  for (int n = 0; n < V_DIM / 8; ++n) {
    const float pair[2] = {sums[m][n][half * 2] * factor, sums[m][n][half * 2 + 1] * factor};
    RESULT* const to = out + n * 8 + threadIdx.x % 4 * 2;
    if constexpr (OUT_ELEMENTS > 1) {
      *reinterpret_cast<Vector<PAIR_BYTES>*>(to) = pack<RESULT, PAIR_BYTES>(pair);
    } else {
      to[0] = from_float<RESULT>(pair[0]);
      to[1] = from_float<RESULT>(pair[1]);
    }
  }
}

// 16-bit results leave by whole chunks, from the warp's own rows of the query tile, which nobody
// else has to do with.
constexpr bool STAGED = OUT_ELEMENTS == 8 && sizeof(RESULT) == 2 &&
                        Tile<BLOCK_Q, V_DIM>::PANELS <= QueryTile::PANELS;

__device__ __forceinline__ void stage_row(char* shared, const Sums& sums, int m, int half,
                                          float factor) {
#pragma unroll
  for (int n = 0; n < V_DIM / 8; ++n) {
    const float pair[2] = {sums[m][n][half * 2] * factor, sums[m][n][half * 2 + 1] * factor};
    char* const chunk = shared + Tile<BLOCK_Q, V_DIM>::chunk(own_row(m, half), n);
    reinterpret_cast<Vector<PAIR_BYTES>*>(chunk)[threadIdx.x % 4] = pack<RESULT, PAIR_BYTES>(pair);
  }
}

__device__ __forceinline__ void store_staged(RESULT* out, long long stride, const char* shared,
                                             int rows) {
  constexpr int CHUNKS = V_DIM / 8;
  constexpr int LANES = CHUNKS > 16 ? 32 : CHUNKS > 8 ? 16 : CHUNKS > 4 ? 8 : 4;  // for a row
  constexpr int STEP = 32 / LANES, STEPS = WARP_ROWS / STEP;
  const int lane = threadIdx.x % 32, chunk = lane % LANES;
  const int first = threadIdx.x / 32 * WARP_ROWS + lane / LANES;
  __syncwarp();
  if (chunk >= CHUNKS) return;
  uint4 values[STEPS];
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    const int place = Tile<BLOCK_Q, V_DIM>::chunk(first + i * STEP, chunk);
    values[i] = *reinterpret_cast<const uint4*>(shared + place);
  }
  out += first * stride + chunk * 8;
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    if (i * STEP < rows - first) __stcg(reinterpret_cast<uint4*>(out), values[i]);
    out += STEP * stride;
  }
}

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
