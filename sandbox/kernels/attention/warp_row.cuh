// Rows spread over the lanes of a warp, and their products.
#pragma once
#include "sums.cuh"

// Width values in pieces of Count: a lane has the pieces lane, lane + 32, ..., zeros past the last.
template <int Width, int Count = 1> struct WarpRow {
  static constexpr int PIECES = Width / Count;
  static constexpr int A_LANE = (PIECES + 31) / 32;
  float values[A_LANE][Count] = {};

  // Calls visit(column, values) for each piece of the lane.
  template <class Visit> __device__ __forceinline__ void each(const Visit& visit) {
#pragma unroll
    for (int i = 0; i < A_LANE; ++i) {
      const int piece = int(threadIdx.x & 31) + 32 * i;
      if (piece < PIECES) visit(piece * Count, values[i]);
    }
  }

  // What it was times `factor`, plus the first columns of `row` times `weight`. Its last pieces may
  // come to hold columns past Width, which nobody visits.
  template <int RowWidth>
  __device__ __forceinline__ void add(float factor, float weight,
                                      const WarpRow<RowWidth, Count>& row) {
    static_assert(RowWidth >= Width, "a row has all the columns");
#pragma unroll
    for (int i = 0; i < A_LANE; ++i) {
#pragma unroll
      for (int j = 0; j < Count; ++j) {
        values[i][j] = values[i][j] * factor + weight * row.values[i][j];
      }
    }
  }
};

// The same in all lanes.
template <int Width, int Count>
__device__ __forceinline__ float dot(const WarpRow<Width, Count>& left,
                                     const WarpRow<Width, Count>& right) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < WarpRow<Width, Count>::A_LANE; ++i) {
#pragma unroll
    for (int j = 0; j < Count; ++j) sum += left.values[i][j] * right.values[i][j];
  }
  return warp_sum(sum);
}
