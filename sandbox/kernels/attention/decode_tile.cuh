// Tiles of 16-bit elements in shared memory, and the products of two of them by a warp.
#pragma once
#include "mma.cuh"

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

// Fragments of `tile` for lane `lane`: a is 16 rows from `row` on by 16 columns, the left factor of
// mma_m16n8k16; b two right factors, each 8 rows by 16 columns; v two right factors of which the
// rows are the summed index, 16 rows by 8 columns each.
template <class Tile>
__device__ __forceinline__ void load_a(unsigned int (&a)[4], const char* tile, int row, int step,
                                       int lane) {
  ldmatrix(a, tile + Tile::place(row + (lane & 15), 2 * step + (lane >> 4)));
}

template <class Tile>
__device__ __forceinline__ void load_b(unsigned int (&b)[4], const char* tile, int row, int step,
                                       int lane) {
  ldmatrix(b, tile + Tile::place(row + (lane & 7) + (lane >> 4) * 8, 2 * step + (lane >> 3 & 1)));
}

template <class Tile>
__device__ __forceinline__ void load_v(unsigned int (&v)[4], const char* tile, int row, int piece,
                                       int lane) {
  ldmatrix_trans(v, tile + Tile::place(row + (lane & 15), piece + (lane >> 4)));
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
