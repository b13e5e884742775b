// Tiles of 16-bit elements in shared memory, and the products of two of them by a warp.
#pragma once
#include "mma.cuh"
#include "registers.cuh"

// Rows of Columns elements, padded to whole steps of 16. Pieces of 16 bytes lie so that eight rows
// at one column share no bank: where eight divides their number, in an order of each row's own, else
// at an odd stride.
template <int Rows, int Columns> struct Tile {
  static constexpr int STEPS = (Columns + 15) / 16;
  static constexpr int PIECES = 2 * STEPS;
  static constexpr bool SWIZZLED = PIECES % 8 == 0;
  static constexpr int STRIDE = SWIZZLED ? PIECES : PIECES | 1;
  static constexpr int BYTES = Rows * STRIDE * 16;

  static __device__ __forceinline__ int place(int row, int piece) {
    return (row * STRIDE + (SWIZZLED ? piece ^ (row & 7) : piece)) * 16;
  }
};

// What one lane loads of a tile: addresses of pieces, from that of a first one, in so many orders of a
// row's pieces as its tile has need of. The tile starts at a multiple of 128 bytes.
template <class Tile> struct Lane {
  SharedAddress first;

  // `pieces` further right, whose lowest three bits are none of the first piece's.
  __device__ __forceinline__ SharedAddress turned(int pieces) const {
    return Tile::SWIZZLED ? flipped(first, (pieces & 7) * 16) : first + (pieces & 7) * 16;
  }
  // Of a piece that `turned` gave: a multiple of 8 `rows` further down and of 8 `pieces` on.
  static constexpr __device__ __forceinline__ int further(int rows, int pieces) {
    return rows * Tile::STRIDE * 16 + (pieces & ~7) * 16;
  }
  __device__ __forceinline__ SharedAddress at(int rows, int pieces) const {
    return turned(pieces) + further(rows, pieces);
  }
};

// Lanes for ldmatrix of four matrices, from `row` and `piece` on. A left factor of mma_m16n8k16: 16
// rows by 16 columns; or, transposed, two right factors of which rows are the summed index, each 16
// rows by 8 columns. Two right factors: each 8 rows by 16 columns.
template <class Tile>
__device__ __forceinline__ Lane<Tile> left_lane(const char* tile, int lane, int row, int piece) {
  return {shared_address_of(tile + Tile::place(row + (lane & 15), piece + (lane >> 4)))};
}
template <class Tile>
__device__ __forceinline__ Lane<Tile> right_lane(const char* tile, int lane, int row, int piece) {
  const int place = Tile::place(row + (lane & 7) + (lane >> 4) * 8, piece + (lane >> 3 & 1));
  return {shared_address_of(tile + place)};
}

// Two neighbouring right factors from one load.
template <class Element>
__device__ __forceinline__ void multiply_pair(float (&left)[4], float (&right)[4],
                                              const unsigned int (&a)[4],
                                              const unsigned int (&pair)[4]) {
  const unsigned int first[2] = {pair[0], pair[1]}, second[2] = {pair[2], pair[3]};
  mma_m16n8k16<Element>(left, a, first, left);
  mma_m16n8k16<Element>(right, a, second, right);
}
