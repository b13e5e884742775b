// Tensor-core decode: ROWS query rows (heads of a request's new tokens) stay in shared memory and
// their results in registers while tiles of TOKENS keys pass by; a tile is loaded once and serves as
// keys and as values. Scores are split over the warps by rows and keys (and in QK_K ways by columns,
// to be added up), results by columns, so that every warp meets all probabilities in shared memory.
//
// Warps are one team, or two with half the rows each. Of two the second is late by its values: while
// the first is at scores, which take shared memory most, it is at values, which take tensor cores
// most, and the other way round.
#include "cache_read.cuh"
#include "decode_schedule.cuh"
#include "decode_tile.cuh"
#include "online_softmax.cuh"
#include "overlap.cuh"
#include "strides.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int WIDTH = LATENT + ROPE;
constexpr bool PACKED = FORMAT != PLAIN;
constexpr unsigned ALL_LANES = 0xffffffffu;

constexpr int TEAM_WARPS = WARPS / TEAMS;
constexpr int TEAM_ROWS = ROWS / TEAMS;
constexpr bool STAGGERED = TEAMS == 2 && !PACKED;  // packed keys have one tile, not two

// Scores: each warp has S_ROWS rows and S_TOKENS keys, of whose sums it keeps OWN groups of 8 keys.
constexpr int QK_N = TEAM_WARPS / (QK_M * QK_K);
constexpr int S_ROWS = TEAM_ROWS / QK_M;
constexpr int S_TOKENS = TOKENS / QK_N;
constexpr int S_M = S_ROWS / 16;
constexpr int S_N = S_TOKENS / 8;
constexpr int OWN = S_N / QK_K;
constexpr int GROUPS = QK_N * QK_K;  // of warps that share rows

// Results: each warp has all rows of its team and UNITS times 16 columns.
constexpr int COLUMN_UNITS = (LATENT + 15) / 16;
constexpr int UNITS = (COLUMN_UNITS + TEAM_WARPS - 1) / TEAM_WARPS;
constexpr int O_M = TEAM_ROWS / 16;

using QueryTile = Tile<ROWS, WIDTH>;
using KeyTile = Tile<TOKENS, WIDTH>;
using WeightTile = Tile<ROWS, TOKENS>;
using Layout = RowLayout<FORMAT, LATENT, ROPE>;

// A packed row as it comes from the cache, and how it gets there.
constexpr int RAW_BYTES = PACKED ? Layout::BYTES : WIDTH * 2;
constexpr int RAW_STRIDE = (RAW_BYTES + 15) / 16 * 16;
constexpr int ROW_ROOM = PACKED ? RAW_BYTES : KeyTile::PIECES * 16;
static_assert(PACKED || COPY_BYTES == 16, "tiles are made of pieces of 16 bytes");
constexpr int COPY_THREADS = STAGGERED ? THREADS / 2 : THREADS;  // the late team's
constexpr int ROWS_AT_ONCE = COPY_THREADS / 8;                   // eight threads copy a row
constexpr int PASSES = (TOKENS + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;

// Whether all keys of a tile are in one block, whose id is the only one of the tile.
constexpr bool ONE_BLOCK = !SPARSE && BLOCK_SIZE % TOKENS == 0;

constexpr int KEY_TILES = PACKED ? 1 : 2;
constexpr int AT_KEYS = (QueryTile::BYTES + 127) / 128 * 128;
constexpr int AT_RAW = AT_KEYS + KEY_TILES * KeyTile::BYTES;
constexpr int AT_WEIGHTS = (AT_RAW + (PACKED ? TOKENS * RAW_STRIDE : 0) + 127) / 128 * 128;
constexpr int WEIGHT_BYTES = WeightTile::BYTES;
constexpr int AT_TOPS = AT_WEIGHTS + WEIGHT_BYTES;
constexpr int AT_SHRINKS = AT_TOPS + GROUPS * ROWS * 4;
constexpr int AT_IDS = AT_SHRINKS + ROWS * 4;
constexpr int AT_SUMS = AT_IDS + 3 * TOKENS * 4;
constexpr int AT_DEALT = AT_SUMS + (WARPS + 3) * 4;
constexpr int SHARED_BYTES = AT_DEALT + 12 * 4;
static_assert(SHARED == SHARED_BYTES, "the launcher and the kernel disagree on shared memory");
static_assert(QK_K == 1 || ROWS * TOKENS * 2 <= WEIGHT_BYTES, "halves of sums go through weights");
static_assert(TEAMS == 1 || TEAMS == 2, "there is an early and a late team");
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
  int thread, lane;
  int team, warp;        // of the team
  int qk_m, qk_n, qk_k;  // which part of the scores this warp has

  __device__ __forceinline__ explicit Block(char* shared)
      : shared(shared),
        thread(kept_thread()),
        lane(thread % 32),
        team(thread / (32 * TEAM_WARPS)),
        warp(thread / 32 % TEAM_WARPS),
        qk_m(warp / (QK_N * QK_K)),
        qk_n(warp / QK_K % QK_N),
        qk_k(warp % QK_K) {}

  __device__ __forceinline__ char* keys(int stage) const {
    return shared + AT_KEYS + (PACKED ? 0 : stage) * KeyTile::BYTES;
  }
  __device__ __forceinline__ char* weights() const { return shared + AT_WEIGHTS; }
  // GROUPS numbers of each row, one of each group.
  __device__ __forceinline__ float* tops(int row) const {
    return reinterpret_cast<float*>(shared + AT_TOPS) + row * GROUPS;
  }
  __device__ __forceinline__ float* shrinks() const {
    return reinterpret_cast<float*>(shared + AT_SHRINKS);
  }
  // Block ids or slots of a tile's keys, negative for none; those of three tiles are kept.
  __device__ __forceinline__ int* ids(int tile) const {
    return reinterpret_cast<int*>(shared + AT_IDS) + tile % 3 * TOKENS;
  }
  // Row and key of a score, counted in the tile, and the group of keys that the warp keeps.
  __device__ __forceinline__ int score_row(int m, int half) const {
    return team * TEAM_ROWS + qk_m * S_ROWS + m * 16 + half * 8 + lane / 4;
  }
  __device__ __forceinline__ int score_token(int n) const {
    return qk_n * S_TOKENS + (qk_k * OWN + n) * 8 + lane % 4 * 2;
  }
  __device__ __forceinline__ int group() const { return qk_n * QK_K + qk_k; }

  // A barrier of the team; each has as many between two of the block. On the host, of the block.
  __device__ __forceinline__ void team_sync() const {
#ifndef SANDBOX_HOST
    if constexpr (TEAMS > 1) {
      asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "n"(32 * TEAM_WARPS) : "memory");
      return;
    }
#endif
    __syncthreads();
  }

  // The thread's number among those that copy, negative for the others.
  __device__ __forceinline__ int copy_thread() const { return thread - (THREADS - COPY_THREADS); }
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

// Starts to copy the ids of a tile's keys, a thread an id; negative ones stand for places that no
// query sees.
__device__ __forceinline__ void copy_ids(const Block& block, const RequestKeys& keys,
                                         const Span& span, int query, int tile) {
  static_assert(TOKENS <= COPY_THREADS, "a thread a key");
  const int row = block.copy_thread(), place = tile * TOKENS + row;
  if (row < 0 || row >= (ONE_BLOCK ? 1 : TOKENS)) return;
  int* to = block.ids(tile) + row;
  if (ONE_BLOCK || (place >= span.first && place < span.end)) {
    cp_async<4>(to, SPARSE ? keys.index_of(query, place) : keys.block_of(place, BLOCK_SIZE));
  } else {
    *to = -1;
  }
}

// Whether there is a key in a row of a tile.
__device__ __forceinline__ bool key_exists(const Block& block, const KeyLayout& layout,
                                           const Span& span, int tile, int row) {
  const int place = tile * TOKENS + row;
  const bool inside = !ONE_BLOCK || (place >= span.first && place < span.end);
  return inside && is_row(layout, block.ids(tile)[ONE_BLOCK ? 0 : row], BLOCK_SIZE, SPARSE);
}

// Copies a tile of keys whose ids are there, eight threads a row; a key that is not there is zeros.
// Pieces are started one by one, so that other work can go on between.
struct KeyCopier {
  static constexpr int IN_ROW = (ROW_ROOM + 8 * COPY_BYTES - 1) / (8 * COPY_BYTES);
  static constexpr int PIECES = PASSES * IN_ROW;

  const KeyLayout& layout;
  const char* cache;
  const int* ids;
  int first_place;
  Span inside;  // places of keys, where the block is the same for all
  bool active;
  bool complete = true;  // whether there was a key in each row so far
  int row, part;
  SharedAddress to;
  const char* from = nullptr;  // the row of this pass
  unsigned int there;          // whether it exists

  __device__ __forceinline__ KeyCopier(const Block& block, const KeyLayout& layout,
                                       const Span& span, const char* cache, int tile, int stage,
                                       bool wanted)
      : layout(layout),
        cache(cache),
        ids(block.ids(tile)),
        first_place(tile * TOKENS),
        inside(span),
        active(wanted && block.copy_thread() >= 0),
        row(block.copy_thread() / 8),
        part(block.copy_thread() % 8) {
    const char* first = PACKED
                            ? block.shared + AT_RAW + row * RAW_STRIDE + part * COPY_BYTES
                            : block.keys(stage) + KeyTile::place(row, part);
    to = kept(shared_address_of(first));
    if (ONE_BLOCK && active) {
      const int id = ids[0];
      if (!is_row(layout, id, BLOCK_SIZE, false)) inside.end = 0;
      const long long offset = row_offset_of(layout, id, first_place, BLOCK_SIZE, false);
      from = cache + max(offset, 0LL) + row * layout.row_stride + part * COPY_BYTES;
    }
  }

  // From the first piece of a row on, `from` and `there` are those of the row.
  __device__ __forceinline__ void find(int pass, int key) {
    bool exists;
    if constexpr (ONE_BLOCK) {
      const int place = first_place + key;
      exists = place >= inside.first && place < inside.end;
      if (pass > 0) from += ROWS_AT_ONCE * layout.row_stride;
    } else {
      const long long offset =
          row_offset_of(layout, ids[key], first_place + key, BLOCK_SIZE, SPARSE);
      exists = offset >= 0;
      from = cache + max(offset, 0LL) + part * COPY_BYTES;
    }
    complete &= exists;
    there = kept((unsigned int)exists);
  }

  __device__ __forceinline__ void start(int piece) {
    const int pass = piece / IN_ROW, at = piece % IN_ROW * 8 * COPY_BYTES;
    const int key = pass * ROWS_AT_ONCE + row;
    constexpr int PASS_BYTES = ROWS_AT_ONCE * (PACKED ? RAW_STRIDE : KeyTile::STRIDE * 16);
    const bool inside = at + 8 * COPY_BYTES <= ROW_ROOM || at + part * COPY_BYTES < ROW_ROOM;
    const bool real = at + 8 * COPY_BYTES <= RAW_BYTES || at + part * COPY_BYTES < RAW_BYTES;
    if (!active || (TOKENS % ROWS_AT_ONCE != 0 && key >= TOKENS)) return;
    if (at == 0) find(pass, key);
    if (inside) {
      cp_async_if<COPY_BYTES>(real ? there : 0, to + pass * PASS_BYTES + at, from + at);
    }
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

using Scores = float[S_M][OWN][4];
using PartialScores = float[S_M][S_N][4];  // over some of the columns

// Scores of the warp's rows and keys, summed over its share of the columns. The factors of a step are
// loaded during the one before, and the next tile's keys are copied meanwhile.
__device__ __forceinline__ void multiply_keys(const Block& block, const char* keys,
                                              KeyCopier& copier, PartialScores& scores) {
  constexpr int STEPS = (KeyTile::STEPS + QK_K - 1) / QK_K;
  constexpr int COPIES = (KeyCopier::PIECES + STEPS - 1) / STEPS;
  constexpr int TURNS = 4 / QK_K;
  const auto query_lane =
      left_lane<QueryTile>(block.shared, block.lane, block.score_row(0, 0) - block.lane / 4,
                           2 * block.qk_k);
  const auto key_lane =
      right_lane<KeyTile>(keys, block.lane, block.qk_n * S_TOKENS, 2 * block.qk_k);
  SharedAddress query_at[TURNS], key_at[TURNS];
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn) {
    query_at[turn] = kept(query_lane.turned(2 * QK_K * turn));
    key_at[turn] = kept(key_lane.turned(2 * QK_K * turn));
  }
#pragma unroll
  for (int m = 0; m < S_M; ++m) {
#pragma unroll
    for (int n = 0; n < S_N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[m][n][i] = 0.0f;
    }
  }
  unsigned int a[2][S_M][4], b[2][S_N / 2][4];
  const auto missing = [&](int i) {
    return i >= STEPS || (KeyTile::STEPS % QK_K != 0 && i == STEPS - 1 && block.qk_k != 0);
  };
  const auto load = [&](int i) {
#pragma unroll
    for (int m = 0; m < S_M; ++m) {
      ldmatrix(a[i % 2][m], query_at[i % TURNS] + query_lane.further(m * 16, 2 * QK_K * i));
    }
#pragma unroll
    for (int n = 0; n < S_N / 2; ++n) {
      ldmatrix(b[i % 2][n], key_at[i % TURNS] + key_lane.further(n * 16, 2 * QK_K * i));
    }
  };
  load(0);
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    if (!missing(i + 1)) load(i + 1);
#pragma unroll
    for (int piece = i * COPIES; piece < min((i + 1) * COPIES, KeyCopier::PIECES); ++piece) {
      copier.start(piece);
    }
    if (missing(i)) break;
#pragma unroll
    for (int n = 0; n < S_N; n += 2) {
#pragma unroll
      for (int m = 0; m < S_M; ++m) {
        multiply_pair<ELEMENT>(scores[m][n], scores[m][n + 1], a[i % 2][m], b[i % 2][n / 2]);
      }
    }
  }
}

// Scores of the keys that this warp keeps: where two have sums over different columns, each gives the
// other half of the keys. By all threads of a team.
__device__ __forceinline__ void add_halves(const Block& block, const PartialScores& partial,
                                           Scores& scores) {
  if constexpr (QK_K == 1) {
    memcpy(scores, partial, sizeof(scores));
    return;
  }
  constexpr int COUNT = S_M * OWN * 4;
  float given[COUNT];
#pragma unroll
  for (int m = 0; m < S_M; ++m) {
#pragma unroll
    for (int n = 0; n < OWN; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float low = partial[m][n][i], high = partial[m][(n + OWN) % S_N][i];
        scores[m][n][i] = block.qk_k == 0 ? low : high;
        given[(m * OWN + n) * 4 + i] = block.qk_k == 0 ? high : low;
      }
    }
  }
  char* weights = block.weights() + WeightTile::place(block.team * TEAM_ROWS, 0);
  float* exchange = reinterpret_cast<float*>(weights) + block.warp / 2 * COUNT * 32 + block.lane;
  const auto give = [&] {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) exchange[i * 32] = given[i];
  };
  const auto take = [&] {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) (&scores[0][0][0])[i] += exchange[i * 32];
  };
  if (block.qk_k == 1) give();
  block.team_sync();
  if (block.qk_k == 0) {
    take();
    give();
  }
  block.team_sync();
  if (block.qk_k == 1) take();
}

__device__ __forceinline__ float quad_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, 1));
  return fmaxf(value, __shfl_xor_sync(ALL_LANES, value, 2));
}

__device__ __forceinline__ float quad_sum(float value) {
  value += __shfl_xor_sync(ALL_LANES, value, 1);
  return value + __shfl_xor_sync(ALL_LANES, value, 2);
}

constexpr float LN_2 = 0.69314718056f;
constexpr float LOG2_E = 1.44269504089f;

struct alignas(4 * GROUPS) Groups {
  float of[GROUPS];
};

__device__ __forceinline__ Groups groups_of(const float* row) {
  return *reinterpret_cast<const Groups*>(row);
}

// Weights are relative to a row's largest score of earlier tiles until one is 2 to this power times
// as large, for results need all registers' multiplication then.
constexpr float MOST_GROWTH = 8.0f;

// The softmax so far of the rows whose scores this thread has: the score that weights are relative
// to, and the sum of the weights that it has seen itself.
struct Softmax {
  float top[S_M][2];
  float sum[S_M][2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int m = 0; m < S_M; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        top[m][half] = NO_KEY_LSE;
        sum[m][half] = 0.0f;
      }
    }
  }

  // Scores to 16-bit weights in shared memory, and by how much earlier results shrink. `scale`
  // makes scores exponents of 2. By all threads of a team; a barrier must follow.
  __device__ __forceinline__ void add(const Block& block, const Scores& scores, float scale) {
#pragma unroll
    for (int m = 0; m < S_M; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float largest = NO_KEY_LSE;
#pragma unroll
        for (int n = 0; n < OWN; ++n) {
          largest = fmaxf(largest, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
        }
        largest = quad_max(largest);
        if (block.lane % 4 == 0) {
          block.tops(block.score_row(m, half))[block.group()] = largest;
        }
      }
    }
    block.team_sync();
    char* weights[OWN];  // of this thread's first row
#pragma unroll
    for (int n = 0; n < OWN; ++n) {
      weights[n] = block.weights() + block.lane % 4 * 4 +
                   WeightTile::place(block.score_row(0, 0), block.score_token(n) / 8);
    }
#pragma unroll
    for (int m = 0; m < S_M; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = block.score_row(m, half);
        const Groups tops = groups_of(block.tops(row));
        float largest = tops.of[0];
#pragma unroll
        for (int group = 1; group < GROUPS; ++group) largest = fmaxf(largest, tops.of[group]);
        float shrink = 1.0f;
        if ((largest - top[m][half]) * scale > MOST_GROWTH) {
          shrink = power_of_2((top[m][half] - largest) * scale);
          top[m][half] = largest;
        }
        const float shift = finite_top(top[m][half]) * scale;
        float added = 0.0f;
#pragma unroll
        for (int n = 0; n < OWN; ++n) {
          const float left = power_of_2(fmaf(scores[m][n][2 * half], scale, -shift));
          const float right = power_of_2(fmaf(scores[m][n][2 * half + 1], scale, -shift));
          added += left + right;
          const float pair[2] = {left, right};
          constexpr int ROW_BYTES = WeightTile::STRIDE * 16;
          *reinterpret_cast<unsigned int*>(weights[n] + (m * 16 + half * 8) * ROW_BYTES) =
              pack<ELEMENT, 4>(pair);
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
          block.tops(block.score_row(m, half))[block.group()] = total;
        }
      }
    }
  }
};

__device__ __forceinline__ float sum_of_row(const Block& block, int row) {
  const Groups sums = groups_of(block.tops(row));
  float total = 0.0f;
#pragma unroll
  for (int group = 0; group < GROUPS; ++group) total += sums.of[group];
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
    values_at[unit] = kept(value_lane.at(0, 2 * (first_unit + unit)));
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

// Scores of keys that are not there, or that a row does not see, count for nothing. Most tiles are
// `complete` and seen by everyone.
__device__ __forceinline__ void mask(const Block& block, const RequestKeys& keys, const Span& span,
                                     int first_row, int tile, bool complete, bool everyone_sees,
                                     Scores& scores) {
  if (!complete) {
#pragma unroll
    for (int n = 0; n < OWN; ++n) {
      const int token = block.score_token(n);
      const bool left = key_exists(block, keys.layout, span, tile, token);
      const bool right = key_exists(block, keys.layout, span, tile, token + 1);
#pragma unroll
      for (int m = 0; m < S_M; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (!left) scores[m][n][2 * half] = NO_KEY_LSE;
          if (!right) scores[m][n][2 * half + 1] = NO_KEY_LSE;
        }
      }
    }
  }
  if (SPARSE || everyone_sees) return;
  const int lane = found_anew(block.lane);  // rarely needed: nothing is kept for it from tile to tile
#pragma unroll
  for (int m = 0; m < S_M; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + block.score_row(m, half) - block.lane / 4 + lane / 4;
      const int query = min(row / HEADS, keys.layout.tokens - 1);
      const Span seen = keys.span(query);
#pragma unroll
      for (int n = 0; n < OWN; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int place = tile * TOKENS + block.score_token(n) + i;
          bool sees = place >= seen.first && place < seen.end;
          if (TREE && sees) sees = keys.in_tree(query, place);
          if (!sees) scores[m][n][2 * half + i] = NO_KEY_LSE;
        }
      }
    }
  }
}

// Places that all queries see.
__device__ __forceinline__ Span seen_by_all(const RequestKeys& keys) {
  const Span first = keys.span(0), last = keys.span(keys.layout.tokens - 1);
  return {last.first, TREE ? min(first.end, max(0, keys.own(0))) : first.end};
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

// What a block works on, and how far it has come with its share: in shared memory, since registers
// are needed for other things meanwhile.
struct Dealt {
  WorkItem item;
  int share_size, share_start, share_sequence;
};
static_assert(sizeof(Dealt) <= SHARED_BYTES - AT_DEALT, "no room for what is dealt");

// One item for one block of rows, from its queries to its results.
__device__ __forceinline__ void attend(const Block& block, const AllSequences& sequences,
                                       const char* cache, const Queries& queries,
                                       const Results& results, const WorkItem& item,
                                       int first_row, float scale, float value_scale) {
  const KeyLayout& layout = sequences.keys.layout;
  const RequestKeys keys(sequences.keys, sequences.request(item.sequence));
  const int query = sequences.first_query(item.sequence);
  const Span common = seen_by_all(keys);
  const Span span = keys.span();
  Softmax softmax;
  Sums sums;
  softmax.clear();
  clear(sums);

  // Ids are copied a turn before their keys, and keys a turn before they are needed.
  bool complete = true;
  const auto copier_of = [&](int tile, int stage) {
    const bool wanted = tile < item.tiles.end;
    return KeyCopier(block, layout, span, cache, tile, stage, wanted);
  };
  const auto start_ids = [&](int tile) {
    if (tile < item.tiles.end) copy_ids(block, keys, span, query, tile);
  };
  start_ids(item.tiles.first);
  cp_async_wait_all();
  __syncthreads();
  load_queries(block, queries, sequences, item.sequence, first_row);
  KeyCopier first_copier = copier_of(item.tiles.first, 0);
#pragma unroll
  for (int piece = 0; piece < KeyCopier::PIECES; ++piece) first_copier.start(piece);
  complete = first_copier.complete;
  start_ids(item.tiles.first + 1);

  // The late team has the values of a tile in the next turn.
  const bool late = STAGGERED && block.team == 1;
  for (int tile = item.tiles.first, stage = 0; tile < item.tiles.end + STAGGERED;
       ++tile, stage ^= 1) {
    const bool copied = !STAGGERED || tile < item.tiles.end;
    cp_async_wait_all();
    complete = __syncthreads_and(complete);
    if constexpr (PACKED) {
      restore_keys(block);
      __syncthreads();
    }
    if (late && tile > item.tiles.first) add_values(block, block.keys(stage ^ 1), sums);
    if (late || !copied) block.team_sync();
    if (!copied) break;
    KeyCopier copier = copier_of(tile + 1, stage ^ 1);
    start_ids(tile + 2);
    PartialScores partial;
    Scores scores;
    multiply_keys(block, block.keys(stage), copier, partial);
    add_halves(block, partial, scores);
    const int place = tile * TOKENS;
    mask(block, keys, span, first_row, tile, complete,
         place >= common.first && place + TOKENS <= common.end, scores);
    complete = copier.complete;
    softmax.add(block, scores, scale);
    if (!late) {
      block.team_sync();
      add_values(block, block.keys(stage), sums);
    }
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
  Dealt& dealt = *reinterpret_cast<Dealt*>(shared + AT_DEALT);
  const auto work = [&](const WorkItem& item) {
    if (block.thread == 0) dealt.item = item;
    if (row_block == 0 && item.index == 0 && block.thread == 0) {
      int* of_sequence = parts + 3LL * item.sequence;
      of_sequence[0] = item.parts.count;
      of_sequence[1] = item.parts.first;
      of_sequence[2] = item.parts.rest;
    }
    __syncthreads();
    attend(block, sequences, cache, queries, results, dealt.item, row_block * ROWS, scale, of_rows);
  };
  if constexpr (CUT == SHARES) {
    int* sums = reinterpret_cast<int*>(shared + AT_SUMS);
    Share<TOKENS, OVERHEAD, THREADS, SPARSE> share(sequences, groups, blockIdx.x / row_blocks, sums);
    WorkItem item;
    while (share.next(item)) {
      __syncthreads();  // all have read what was dealt before
      if (block.thread == 0) {
        dealt.share_size = share.size;
        dealt.share_start = share.start;
        dealt.share_sequence = share.sequence;
      }
      work(item);
      share.size = dealt.share_size;
      share.start = dealt.share_start;
      share.sequence = dealt.share_sequence;
    }
  } else {
    const WorkItem item =
        part_of_sequence<CUT, TOKENS>(sequences, cut_size, most_parts, blockIdx.x / row_blocks);
    if (item.index == 0 || item.tiles.count() > 0) work(item);
  }
}
