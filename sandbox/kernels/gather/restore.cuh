// Rows of packed codes to rows of OUT; the macros FORMAT, LATENT, ROPE and COUNT say how.
#pragma once
#include "cache_read.cuh"
#include "paged.cuh"

using Reader = RowReader<FORMAT, LATENT, ROPE, COUNT>;

// Pieces of COUNT values in a row.
constexpr int PIECES = Reader::VALUES / COUNT;

// The descale of all rows, where there is one.
__device__ __forceinline__ float tensor_scale(const float* k_scale) {
  if constexpr (Reader::HAS_TENSOR_SCALE) return __ldg(k_scale);
  return 0.0f;
}

// A piece to its columns of an output row, value by value.
__device__ __forceinline__ void store_each(char* row, int column, const Reader::Piece& piece) {
  float values[COUNT];
  Reader::restore(piece, column, values);
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    reinterpret_cast<OUT*>(row)[column + i] = from_float<OUT>(values[i]);
  }
}

// The same in one access.
__device__ __forceinline__ void store_piece(char* row, int column, const Reader::Piece& piece) {
  constexpr int BYTES = COUNT * int(sizeof(OUT));
  float values[COUNT];
  Reader::restore(piece, column, values);
  store_once<BYTES>(row + column * int(sizeof(OUT)), pack<OUT, BYTES>(values));
}

// Restores Rows rows as one flat run of pieces, by Threads threads that call it together.
// `offset_of(row)`, called by all of them at once, gives a row's place after `rows`, or one of the
// negative constants of paged.cuh. `all_found` says, to all alike, that it gives places only: then
// all loads of a pass are under way before the first value is needed.
template <int Rows, int Threads, int MaxInFlight, class OffsetOf>
__device__ __forceinline__ void restore_rows(const char* rows, const OffsetOf& offset_of,
                                             bool all_found, float scale, char* out,
                                             long long out_stride, int thread) {
  constexpr int TILE = Rows * PIECES;
  constexpr int PASSES = (TILE + Threads * MaxInFlight - 1) / (Threads * MaxInFlight);
  constexpr int IN_FLIGHT = (TILE + Threads * PASSES - 1) / (Threads * PASSES);
  constexpr bool EVEN = TILE == Threads * IN_FLIGHT * PASSES;
  if (all_found) {
#pragma unroll 1
    for (int pass = 0; pass < PASSES; ++pass) {
      Reader::Piece pieces[IN_FLIGHT];
#pragma unroll
      for (int i = 0; i < IN_FLIGHT; ++i) {
        const int index = thread + Threads * (i + IN_FLIGHT * pass);
        const int row = index / PIECES;
        const long long offset = offset_of(EVEN || row < Rows ? row : 0);
        if (EVEN || row < Rows) {
          pieces[i] = Reader::load(rows + offset, (index - row * PIECES) * COUNT, scale);
        }
      }
#pragma unroll
      for (int i = 0; i < IN_FLIGHT; ++i) {
        const int index = thread + Threads * (i + IN_FLIGHT * pass);
        const int row = index / PIECES;
        if (EVEN || row < Rows) {
          store_piece(out + row * out_stride, (index - row * PIECES) * COUNT, pieces[i]);
        }
      }
    }
    return;
  }
#pragma unroll 1
  for (int first = 0; first < TILE; first += Threads) {
    const int row = (first + thread) / PIECES;
    const int column = (first + thread - row * PIECES) * COUNT;
    const long long offset = offset_of(row < Rows ? row : 0);
    if (row >= Rows || offset == ROW_NOT_OWNED) continue;
    Reader::Piece piece = {};
    if (offset != ROW_NOT_FOUND) piece = Reader::load(rows + offset, column, scale);
    store_piece(out + row * out_stride, column, piece);
  }
}
