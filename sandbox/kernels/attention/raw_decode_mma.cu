// Tensor-core decode: ROWS query rows (heads of a request's new tokens) stay in shared memory and
// their results in registers while tiles of TOKENS keys pass by; a tile is loaded once and serves as
// keys and as values. Scores are split over the warps by rows and keys (and in QK_K ways by columns,
// to be added up), results by columns, so that every warp meets all probabilities in shared memory.
#include "cache_read.cuh"
#include "decode_schedule.cuh"
#include "decode_tile.cuh"
#include "overlap.cuh"
#include "strides.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int WIDTH = LATENT + ROPE;
constexpr bool PACKED = FORMAT != PLAIN;
constexpr unsigned ALL_LANES = 0xffffffffu;

// Scores: each warp has S_ROWS rows and S_TOKENS keys, of whose sums it keeps OWN groups of 8 keys.
constexpr int QK_N = WARPS / (QK_M * QK_K);
constexpr int S_ROWS = ROWS / QK_M;
constexpr int S_TOKENS = TOKENS / QK_N;
constexpr int S_M = S_ROWS / 16;
constexpr int S_N = S_TOKENS / 8;
constexpr int OWN = S_N / QK_K;
constexpr int GROUPS = QK_N * QK_K;  // of warps that share rows

// Results: each warp has all rows and UNITS times 16 columns.
constexpr int COLUMN_UNITS = (LATENT + 15) / 16;
constexpr int UNITS = (COLUMN_UNITS + WARPS - 1) / WARPS;
constexpr int O_M = ROWS / 16;

using QueryTile = Tile<ROWS, WIDTH>;
using KeyTile = Tile<TOKENS, WIDTH>;
using WeightTile = Tile<ROWS, TOKENS>;
using Layout = RowLayout<FORMAT, LATENT, ROPE>;

// A packed row as it comes from the cache, and how it gets there.
constexpr int RAW_BYTES = PACKED ? Layout::BYTES : WIDTH * 2;
constexpr int RAW_STRIDE = (RAW_BYTES + 15) / 16 * 16;
constexpr int ROWS_AT_ONCE = THREADS / 8;  // eight threads copy a row
constexpr int PASSES = (TOKENS + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;

constexpr int KEY_TILES = PACKED ? 1 : 2;
constexpr int AT_KEYS = QueryTile::BYTES;
constexpr int AT_RAW = AT_KEYS + KEY_TILES * KeyTile::BYTES;
constexpr int AT_WEIGHTS = AT_RAW + (PACKED ? TOKENS * RAW_STRIDE : 0);
constexpr int WEIGHT_BYTES = WeightTile::BYTES;
constexpr int AT_TOPS = AT_WEIGHTS + WEIGHT_BYTES;
constexpr int AT_SHRINKS = AT_TOPS + GROUPS * ROWS * 4;
constexpr int AT_EXISTS = AT_SHRINKS + ROWS * 4;
constexpr int AT_SUMS = AT_EXISTS + 2 * TOKENS;
constexpr int SHARED_BYTES = AT_SUMS + (WARPS + 3) * 8;
static_assert(SHARED == SHARED_BYTES, "the launcher and the kernel disagree on shared memory");
static_assert(QK_K == 1 || ROWS * TOKENS * 2 <= WEIGHT_BYTES, "halves of sums go through weights");
static_assert(S_N % 2 == 0 && OWN > 0 && S_M > 0 && QK_N > 0, "fragments of keys come in pairs");

struct Queries {
  const QUERY* q;
  const RequestStrides& strides;
  int row_count;  // of a sequence
};

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

using AllSequences = Sequences<SPARSE>;

// What a row of the block stands for.
struct Row {
  int request, query, head;

  // `row` counts heads, those of all queries where they share keys.
  __device__ __forceinline__ Row(const AllSequences& sequences, int sequence, int row)
      : request(sequences.request(sequence)),
        query(sequences.first_query(sequence) + row / HEADS),
        head(row % HEADS) {}
};

struct Block {
  char* shared;
  int thread, lane, warp;
  int qk_m, qk_n, qk_k;  // which part of the scores this warp has

  __device__ __forceinline__ explicit Block(char* shared)
      : shared(shared),
        thread(threadIdx.x),
        lane(threadIdx.x % 32),
        warp(threadIdx.x / 32),
        qk_m(warp / (QK_N * QK_K)),
        qk_n(warp / QK_K % QK_N),
        qk_k(warp % QK_K) {}

  __device__ __forceinline__ char* keys(int stage) const {
    return shared + AT_KEYS + (PACKED ? 0 : stage) * KeyTile::BYTES;
  }
  __device__ __forceinline__ char* weights() const { return shared + AT_WEIGHTS; }
  __device__ __forceinline__ float* tops() const {
    return reinterpret_cast<float*>(shared + AT_TOPS);
  }
  __device__ __forceinline__ float* shrinks() const {
    return reinterpret_cast<float*>(shared + AT_SHRINKS);
  }
  __device__ __forceinline__ unsigned char* exists(int stage) const {
    return reinterpret_cast<unsigned char*>(shared + AT_EXISTS + stage * TOKENS);
  }
  // Row and key of a score, counted in the tile, and the group of keys that the warp keeps.
  __device__ __forceinline__ int score_row(int m, int half) const {
    return qk_m * S_ROWS + m * 16 + half * 8 + lane / 4;
  }
  __device__ __forceinline__ int score_token(int n) const {
    return qk_n * S_TOKENS + (qk_k * OWN + n) * 8 + lane % 4 * 2;
  }
  __device__ __forceinline__ int group() const { return qk_n * QK_K + qk_k; }
};

// Queries of a block to shared memory; rows that do not exist are zeros.
__device__ __forceinline__ void load_queries(const Block& block, const Queries& queries,
                                             const AllSequences& sequences, int sequence,
                                             int first_row) {
  for (int i = block.thread; i < ROWS * QueryTile::PIECES; i += THREADS) {
    const int row = i / QueryTile::PIECES, piece = i % QueryTile::PIECES;
    char* to = block.shared + QueryTile::place(row, piece);
    const bool real = first_row + row < queries.row_count && piece * 8 < WIDTH;
    const Row from(sequences, sequence, real ? first_row + row : 0);
    const QUERY* source =
        queries.q + queries.strides(from.request, from.query, from.head) + (real ? piece * 8 : 0);
    if constexpr (sizeof(QUERY) == 2) {
      cp_async<16>(to, source, real ? 16 : 0);
    } else {
      float values[8] = {};
      if (real) unpack_fp8<E4M3, 8>(load_once<8>(source), values);
      *reinterpret_cast<uint4*>(to) = pack<ELEMENT, 16>(values);
    }
  }
}

// Copies tiles of keys, eight threads a row. Where rows lie is looked up a tile ahead.
struct KeyCopier {
  const RequestKeys& keys;
  const Span span;
  const int query;
  const char* cache;
  long long rows[PASSES];  // offsets of the tile to be copied next, negative for no key

  __device__ __forceinline__ void find(const Block& block, int tile) {
#pragma unroll
    for (int i = 0; i < PASSES; ++i) {
      const int row = i * ROWS_AT_ONCE + block.thread / 8, place = tile * TOKENS + row;
      const bool inside = row < TOKENS && place >= span.first && place < span.end;
      rows[i] = inside ? keys.row_offset(query, place) : NO_ROW;
    }
  }

  __device__ __forceinline__ void start(const Block& block, int stage) const {
    const int part = block.thread % 8;
#pragma unroll
    for (int i = 0; i < PASSES; ++i) {
      const int row = i * ROWS_AT_ONCE + block.thread / 8;
      if (TOKENS % ROWS_AT_ONCE != 0 && row >= TOKENS) break;
      const bool there = rows[i] >= 0;
      const char* from = cache + (there ? rows[i] : 0);
      if constexpr (PACKED) {
        char* to = block.shared + AT_RAW + row * RAW_STRIDE;
#pragma unroll
        for (int at = 0; at < RAW_BYTES; at += 8 * COPY_BYTES) {
          const int mine = at + part * COPY_BYTES;
          if (at + 8 * COPY_BYTES <= RAW_BYTES || mine < RAW_BYTES) {
            cp_async<COPY_BYTES>(to + mine, from + mine, there ? COPY_BYTES : 0);
          }
        }
      } else {
#pragma unroll
        for (int first = 0; first < KeyTile::PIECES; first += 8) {
          const int piece = first + part;
          if (first + 8 > KeyTile::PIECES && piece >= KeyTile::PIECES) break;
          const bool real = there && piece * 8 < WIDTH;
          cp_async<16>(block.keys(stage) + KeyTile::place(row, piece),
                       from + (real ? piece * 16 : 0), real ? 16 : 0);
        }
      }
      if (part == 0) block.exists(stage)[row] = there;
    }
    cp_async_commit();
  }
};

// Packed rows in shared memory to a tile of numbers, without the descale that all rows share.
__device__ __forceinline__ void restore_keys(const Block& block) {
  using Reader = RowReader<FORMAT, LATENT, ROPE, 8, SharedMemory>;
  constexpr int IN_ROW = WIDTH / 8;
#pragma unroll 2
  for (int i = block.thread; i < TOKENS * KeyTile::PIECES; i += THREADS) {
    const int row = i / KeyTile::PIECES, piece = i % KeyTile::PIECES;
    float values[8] = {};
    if (KeyTile::PIECES == IN_ROW || piece < IN_ROW) {
      const char* from = block.shared + AT_RAW + row * RAW_STRIDE;
      Reader::restore(Reader::load(from, piece * 8, 1.0f), piece * 8, values);
    }
    *reinterpret_cast<uint4*>(block.keys(0) + KeyTile::place(row, piece)) =
        pack<ELEMENT, 16>(values);
  }
}

using Scores = float[S_M][S_N][4];

// Scores of the warp's rows and keys, summed over its share of the columns.
__device__ __forceinline__ void multiply_keys(const Block& block, const char* keys,
                                              Scores& scores) {
#pragma unroll
  for (int m = 0; m < S_M; ++m) {
#pragma unroll
    for (int n = 0; n < S_N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[m][n][i] = 0.0f;
    }
  }
  constexpr int STEPS = (KeyTile::STEPS + QK_K - 1) / QK_K;
#pragma unroll QK_UNROLL
  for (int i = 0; i < STEPS; ++i) {
    const int step = i * QK_K + block.qk_k;
    if (KeyTile::STEPS % QK_K != 0 && step >= KeyTile::STEPS) break;
    unsigned int a[S_M][4];
#pragma unroll
    for (int m = 0; m < S_M; ++m) {
      load_a<QueryTile>(a[m], block.shared, block.qk_m * S_ROWS + m * 16, step, block.lane);
    }
#pragma unroll
    for (int n = 0; n < S_N; n += 2) {
      unsigned int b[4];
      load_b<KeyTile>(b, keys, block.qk_n * S_TOKENS + n * 8, step, block.lane);
#pragma unroll
      for (int m = 0; m < S_M; ++m) {
        multiply_pair<ELEMENT>(scores[m][n], scores[m][n + 1], a[m], b);
      }
    }
  }
}

// Adds up what two warps have of the same scores; each keeps half of the keys, in the first OWN
// groups. By all threads.
__device__ __forceinline__ void add_halves(const Block& block, Scores& scores) {
  if constexpr (QK_K == 2) {
    float* exchange = reinterpret_cast<float*>(block.weights()) +
                      block.warp / 2 * (S_M * OWN * 4 * 32) + block.lane;
#pragma unroll
    for (int taker = 0; taker < 2; ++taker) {
      if (block.qk_k != taker) {
#pragma unroll
        for (int m = 0; m < S_M; ++m) {
#pragma unroll
          for (int n = 0; n < OWN; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              exchange[((m * OWN + n) * 4 + i) * 32] = scores[m][taker * OWN + n][i];
            }
          }
        }
      }
      __syncthreads();
      if (block.qk_k == taker) {
#pragma unroll
        for (int m = 0; m < S_M; ++m) {
#pragma unroll
          for (int n = 0; n < OWN; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              scores[m][n][i] =
                  scores[m][taker * OWN + n][i] + exchange[((m * OWN + n) * 4 + i) * 32];
            }
          }
        }
      }
      __syncthreads();
    }
  }
}

__device__ __forceinline__ float quad_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, 1));
  return fmaxf(value, __shfl_xor_sync(ALL_LANES, value, 2));
}

__device__ __forceinline__ float quad_sum(float value) {
  value += __shfl_xor_sync(ALL_LANES, value, 1);
  return value + __shfl_xor_sync(ALL_LANES, value, 2);
}

constexpr float NOTHING = -__builtin_huge_valf();
constexpr float LN_2 = 0.69314718056f;
constexpr float LOG2_E = 1.44269504089f;

// The softmax so far of the rows whose scores this thread has: their largest score, and the sum of
// the weights that it has seen itself.
struct Softmax {
  float top[S_M][2];
  float sum[S_M][2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int m = 0; m < S_M; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        top[m][half] = NOTHING;
        sum[m][half] = 0.0f;
      }
    }
  }

  // Scores to 16-bit weights in shared memory, and by how much earlier results shrink. `scale`
  // makes scores exponents of 2. By all threads; a barrier must follow.
  __device__ __forceinline__ void add(const Block& block, const Scores& scores, float scale) {
#pragma unroll
    for (int m = 0; m < S_M; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float largest = NOTHING;
#pragma unroll
        for (int n = 0; n < OWN; ++n) {
          largest = fmaxf(largest, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
        }
        largest = quad_max(largest);
        if (block.lane % 4 == 0) {
          block.tops()[block.group() * ROWS + block.score_row(m, half)] = largest;
        }
      }
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < S_M; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = block.score_row(m, half);
        float largest = top[m][half];
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
          largest = fmaxf(largest, block.tops()[group * ROWS + row]);
        }
        const float shrink = top[m][half] == largest ? 1.0f
                                                     : exp2f((top[m][half] - largest) * scale);
        const float shift = largest == NOTHING ? 0.0f : largest * scale;
        top[m][half] = largest;
        float added = 0.0f;
#pragma unroll
        for (int n = 0; n < OWN; ++n) {
          const float left = exp2f(fmaf(scores[m][n][2 * half], scale, -shift));
          const float right = exp2f(fmaf(scores[m][n][2 * half + 1], scale, -shift));
          added += left + right;
          const int token = block.score_token(n);
          const float pair[2] = {left, right};
          *reinterpret_cast<unsigned int*>(block.weights() + WeightTile::place(row, token / 8) +
                                           token % 8 * 2) = pack<ELEMENT, 4>(pair);
        }
        sum[m][half] = sum[m][half] * shrink + added;
        if (block.group() == 0 && block.lane % 4 == 0) block.shrinks()[row] = shrink;
      }
    }
  }

  // Sums of all threads that share a row, in shared memory where `tops` was. By all threads, between
  // barriers.
  __device__ __forceinline__ void publish_sums(const Block& block) const {
#pragma unroll
    for (int m = 0; m < S_M; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float total = quad_sum(sum[m][half]);
        if (block.lane % 4 == 0) {
          block.tops()[block.group() * ROWS + block.score_row(m, half)] = total;
        }
      }
    }
  }
};

__device__ __forceinline__ float sum_of_row(const Block& block, int row) {
  float total = 0.0f;
#pragma unroll
  for (int group = 0; group < GROUPS; ++group) total += block.tops()[group * ROWS + row];
  return total;
}

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
      shrink[m][half] = block.shrinks()[m * 16 + half * 8 + block.lane / 4];
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
#pragma unroll
  for (int step = 0; step < TOKENS / 16; ++step) {
    unsigned int a[O_M][4];
#pragma unroll
    for (int m = 0; m < O_M; ++m) {
      load_a<WeightTile>(a[m], block.weights(), m * 16, step, block.lane);
    }
#pragma unroll
    for (int unit = 0; unit < UNITS; ++unit) {
      const int column = block.warp * UNITS + unit;
      if (COLUMN_UNITS % UNITS != 0 || COLUMN_UNITS / UNITS < WARPS) {
        if (column >= COLUMN_UNITS) break;
      }
      unsigned int v[4];
      load_v<KeyTile>(v, keys, step * 16, 2 * column, block.lane);
#pragma unroll
      for (int m = 0; m < O_M; ++m) {
        multiply_pair<ELEMENT>(sums[m][2 * unit], sums[m][2 * unit + 1], a[m], v);
      }
    }
  }
}

// Scores of keys that are not there, or that a row does not see, count for nothing.
__device__ __forceinline__ void mask(const Block& block, const RequestKeys& keys, int first_row,
                                     int first_place, bool everyone_sees, int stage,
                                     Scores& scores) {
#pragma unroll
  for (int n = 0; n < OWN; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = block.score_token(n) + i;
      const bool exists = block.exists(stage)[token];
#pragma unroll
      for (int m = 0; m < S_M; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& score = scores[m][n][2 * half + i];
          if (!exists) score = NOTHING;
          if (!SPARSE && !everyone_sees) {
            const int query = (first_row + block.score_row(m, half)) / HEADS;
            if (query < keys.layout.tokens && !keys.sees(query, first_place + token)) {
              score = NOTHING;
            }
          }
        }
      }
    }
  }
}

// Places that all queries see.
__device__ __forceinline__ Span seen_by_all(const RequestKeys& keys) {
  const Span first = keys.span(0), last = keys.span(keys.layout.tokens - 1);
  return {last.first, keys.tree == nullptr ? first.end : min(first.end, max(0, keys.own(0)))};
}

__device__ __forceinline__ void write_pair(float* to, float left, float right) {
  *reinterpret_cast<float2*>(to) = make_float2(left, right);
}

template <class Element>
__device__ __forceinline__ void write_pair(Element* to, float left, float right) {
  const float pair[2] = {left, right};
  *reinterpret_cast<unsigned int*>(to) = pack<Element, 4>(pair);
}

// Sums over weights of all rows, and their LSEs, to where a whole or a part belongs.
__device__ __forceinline__ void write_results(const Block& block, const Results& results,
                                              const AllSequences& sequences, const WorkItem& item,
                                              int first_row, int row_count,
                                              const Softmax& softmax, const Sums& sums,
                                              float scale, float value_scale) {
  const bool whole = item.parts.count == 1;
  const long long slot_row = (long long)item.parts.slot(item.index) * row_count + first_row;
  softmax.publish_sums(block);
  __syncthreads();
  if (block.group() == 0 && block.lane % 4 == 0) {
#pragma unroll
    for (int m = 0; m < S_M; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = block.score_row(m, half);
        const float total = sum_of_row(block, row);
        const float lse = total == 0.0f ? NOTHING
                                        : (softmax.top[m][half] * scale + log2f(total)) * LN_2;
        block.shrinks()[row] = lse;
        if (first_row + row >= row_count) continue;
        const Row to(sequences, item.sequence, first_row + row);
        if (!whole) {
          results.partial_lses[slot_row + row] = lse;
        } else if (results.lse != nullptr) {
          results.lse[results.lse_strides(to.request, to.query, to.head)] =
              lse * results.from_natural;
        }
      }
    }
  }
  __syncthreads();
#pragma unroll
  for (int m = 0; m < O_M; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = m * 16 + half * 8 + block.lane / 4;
      if (first_row + row >= row_count) continue;
      const Row to(sequences, item.sequence, first_row + row);
      const float total = sum_of_row(block, row);
      float factor = total == 0.0f ? 0.0f : value_scale / total;
      if (whole && results.sink != nullptr) {
        factor /= 1.0f + expf(results.sink[to.head] - block.shrinks()[row]);
      }
#pragma unroll
      for (int n = 0; n < 2 * UNITS; ++n) {
        const int column = block.warp * UNITS * 16 + n * 8 + block.lane % 4 * 2;
        if (column >= LATENT) break;
        const float left = total == 0.0f ? 0.0f : sums[m][n][2 * half] * factor;
        const float right = total == 0.0f ? 0.0f : sums[m][n][2 * half + 1] * factor;
        if (whole) {
          const long long at = results.out_strides(to.request, to.query, to.head) + column;
          write_pair(results.out + at, left, right);
        } else {
          write_pair(results.partials + (slot_row + row) * LATENT + column, left, right);
        }
      }
    }
  }
}

// One item for one block of rows, from its queries to its results.
__device__ __forceinline__ void attend(const Block& block, const AllSequences& sequences,
                                       const char* cache, const Queries& queries,
                                       const Results& results, const WorkItem& item,
                                       int first_row, float scale, float value_scale) {
  const RequestKeys keys(sequences.keys, sequences.request(item.sequence));
  const int query = sequences.first_query(item.sequence);
  const Span common = seen_by_all(keys);
  KeyCopier copier = {keys, keys.span(), query, cache};
  Softmax softmax;
  Sums sums;
  softmax.clear();
  clear(sums);

  __syncthreads();  // the item before is done with shared memory
  load_queries(block, queries, sequences, item.sequence, first_row);
  if (item.tiles.count() > 0) {
    copier.find(block, item.tiles.first);
    copier.start(block, 0);
    copier.find(block, item.tiles.first + 1);
  }
  for (int tile = item.tiles.first, stage = 0; tile < item.tiles.end; ++tile, stage ^= 1) {
    cp_async_wait_all();
    __syncthreads();
    if constexpr (PACKED) {
      restore_keys(block);
      __syncthreads();
    }
    if (tile + 1 < item.tiles.end) {
      copier.start(block, stage ^ 1);
      copier.find(block, tile + 2);
    }
    const int place = tile * TOKENS;
    Scores scores;
    multiply_keys(block, block.keys(stage), scores);
    add_halves(block, scores);
    mask(block, keys, first_row, place, place >= common.first && place + TOKENS <= common.end,
         stage, scores);
    softmax.add(block, scores, scale);
    __syncthreads();
    add_values(block, block.keys(stage), sums);
  }
  cp_async_wait_all();
  write_results(block, results, sequences, item, first_row, queries.row_count, softmax, sums, scale,
                value_scale);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    decode_mma(const QUERY* __restrict__ q, const char* __restrict__ cache,
               const int* __restrict__ block_table, const int* __restrict__ seq_lens,
               const int* __restrict__ tree_mask, const int* __restrict__ indices,
               const KeyLayout layout, const RequestStrides q_strides, int sequence_count,
               int row_count, int groups, int cut_size, int most_parts, float softmax_scale,
               const float* __restrict__ q_descale, const float* __restrict__ k_scale,
               const float* __restrict__ sink, OUT* __restrict__ out,
               const RequestStrides out_strides, float* __restrict__ out_lse,
               const RequestStrides lse_strides, float from_natural,
               float* __restrict__ partials, float* __restrict__ partial_lses,
               int* __restrict__ parts) {
  wait_for_previous_kernel();
  extern __shared__ __align__(128) char shared[];
  const Block block(shared);
  const Keys keys = {block_table, seq_lens, tree_mask, indices, layout};
  const AllSequences sequences = {keys, sequence_count};
  const Queries queries = {q, q_strides, row_count};
  const Results results = {out,      out_strides,  out_lse, lse_strides, from_natural, sink,
                           partials, partial_lses, parts};
  const float of_rows = k_scale == nullptr ? 1.0f : k_scale[0];
  const float of_queries = q_descale == nullptr ? 1.0f : q_descale[0];
  const float scale = softmax_scale * of_queries * of_rows * LOG2_E;

  const int row_blocks = (row_count + ROWS - 1) / ROWS;
  const int row_block = blockIdx.x % row_blocks;
  const auto work = [&](const WorkItem& item) {
    if (row_block == 0 && item.index == 0 && block.thread == 0) {
      parts[3 * (long long)item.sequence] = item.parts.count;
      parts[3 * (long long)item.sequence + 1] = item.parts.first;
      parts[3 * (long long)item.sequence + 2] = item.parts.rest;
    }
    attend(block, sequences, cache, queries, results, item, row_block * ROWS, scale, of_rows);
  };
  if constexpr (CUT == SHARES) {
    long long* sums = reinterpret_cast<long long*>(shared + AT_SUMS);
    Share<TOKENS, OVERHEAD, THREADS, SPARSE> share(sequences, groups, blockIdx.x / row_blocks, sums);
    WorkItem item;
    while (share.next(item)) work(item);
  } else {
    const WorkItem item =
        part_of_sequence<CUT, TOKENS>(sequences, cut_size, most_parts, blockIdx.x / row_blocks);
    if (item.index == 0 || item.tiles.count() > 0) work(item);
  }
}
