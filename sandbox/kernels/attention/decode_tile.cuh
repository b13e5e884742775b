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

// threadIdx.x, kept in a register: to read it anew, as the compiler prefers to, takes long.
__device__ __forceinline__ int kept_thread() {
#ifndef SANDBOX_HOST
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
#else
  return threadIdx.x;
#endif
}

// 2 to the power of a score less the largest: subnormal results are 0.
__device__ __forceinline__ float power_of_2(float exponent) {
#ifndef SANDBOX_HOST
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
  return power;
#else
  return exp2f(exponent);
#endif
}

// What one lane loads of a tile: the place of its first piece, from which others follow without much
// arithmetic.
template <class Tile> struct Lane {
  int first;

  // `rows` further down and `pieces` further right. The first is a multiple of 8 rows; the bits of
  // the second are not among those of the first piece.
  __device__ __forceinline__ int at(int rows, int pieces) const {
    const int across =
        Tile::SWIZZLED ? (first ^ (pieces & 7) * 16) + (pieces & ~7) * 16 : first + pieces * 16;
    return across + rows * Tile::STRIDE * 16;
  }
};

// Lanes for ldmatrix of four matrices, from `row` and `piece` on. A left factor of mma_m16n8k16: 16
// rows by 16 columns. Two right factors: each 8 rows by 16 columns. Two right factors of which rows
// are the summed index, transposed: 16 rows by 8 columns each.
template <class Tile>
__device__ __forceinline__ Lane<Tile> left_lane(int lane, int row, int piece) {
  return {Tile::place(row + (lane & 15), piece + (lane >> 4))};
}
template <class Tile>
__device__ __forceinline__ Lane<Tile> right_lane(int lane, int row, int piece) {
  return {Tile::place(row + (lane & 7) + (lane >> 4) * 8, piece + (lane >> 3 & 1))};
}
template <class Tile>
__device__ __forceinline__ Lane<Tile> transposed_lane(int lane, int row, int piece) {
  return left_lane<Tile>(lane, row, piece);
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
