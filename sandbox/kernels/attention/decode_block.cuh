// What a block of raw_decode_mma.cu is made of: who has which scores and results, and what lies where
// in shared memory. The macros are those of its launcher.
#pragma once
#include "cache_read.cuh"
#include "decode_schedule.cuh"
#include "decode_tile.cuh"

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
constexpr bool ONE_BLOCK = !SPARSE && !TREE && BLOCK_SIZE % TOKENS == 0;

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
        thread(kept(threadIdx.x)),
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
