// What a block of raw_prefill_mma.cu is made of: its tiles, what lies where in shared memory, and
// who has which scores and sums. The macros are those of its launcher.
#pragma once
#include "prefill_tile.cuh"

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

#define NEGATIVE_INFINITY __int_as_float(0xff800000)

using Scores = float[M_TILES][BLOCK_K / 8][4];
using Sums = float[M_TILES][ValueTile::PADDED / 8][4];
using Weights = unsigned int[BLOCK_K / 16][M_TILES][4];

// Row of the block that a thread's elements 2 * half and 2 * half + 1 belong to.
__device__ __forceinline__ int own_row(int m, int half) {
  return int(threadIdx.x / 32) * WARP_ROWS + m * 16 + half * 8 + int(threadIdx.x % 32) / 4;
}
