// One output row [left | right], by elements of the left part and pairs of the right one.
#pragma once
#include "cache_row.cuh"

template <class Scalar> __device__ __forceinline__ Scalar* at(Scalar* base, long long bytes) {
  return reinterpret_cast<Scalar*>((char*)base + bytes);
}
template <class Scalar>
__device__ __forceinline__ const Scalar* at(const Scalar* base, long long bytes) {
  return reinterpret_cast<const Scalar*>((const char*)base + bytes);
}

template <class Scalar> struct ElementRow {
  const Scalar* left;
  const Scalar* right;
  Scalar* to;
  int width;  // elements of the left part

  // Item i is element i of the left part, or pair i - width of the right one.
  __device__ __forceinline__ void write(int item, const RopeTable& table, long long position,
                                        int half) const {
    if (item < width) {
      to[item] = left[item];
      return;
    }
    const int pair = item - width;
    Scalar even = right[2 * pair], odd = right[2 * pair + 1];
    if (table.rows != nullptr) {
      const Angles<1> angles = angles_at<1, 4>(table, position, half, pair);
      float x = to_float(even), y = to_float(odd);
      rotate_pair(x, y, angles.cosine[0], angles.sine[0]);
      even = from_float<Scalar>(x);
      odd = from_float<Scalar>(y);
    }
    to[width + 2 * pair] = even;
    to[width + 2 * pair + 1] = odd;
  }
};
