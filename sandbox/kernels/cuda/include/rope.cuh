// Rotary embedding of interleaved pairs (2i, 2i + 1), in float32.
#pragma once
#include "scalar.cuh"

// Row p holds the cosines, then the sines, of position p; null rows: the model does not rotate.
struct RopeTable {
  const float* rows;
  long long stride;  // elements
  long long count;
};

template <int Pairs> struct Angles {
  float cosine[Pairs], sine[Pairs];
};

template <int Count, int Access>
__device__ __forceinline__ void load_floats(const float* from, float (&to)[Count]) {
  constexpr int step = Access / int(sizeof(float));
#pragma unroll
  for (int i = 0; i < Count; i += step) {
    const auto part = __ldg(reinterpret_cast<const Vector<Access>*>(from + i));
    memcpy(to + i, &part, Access);
  }
}

// Angles of the pairs from `first` on, loaded Access bytes at a time; NaN for a position that the
// table does not have.
template <int Pairs, int Access>
__device__ __forceinline__ Angles<Pairs> angles_at(const RopeTable& table, long long position,
                                                   int half, int first) {
  Angles<Pairs> angles;
  if (position >= 0 && position < table.count) {
    const float* row = table.rows + position * table.stride + first;
    load_floats<Pairs, Access>(row, angles.cosine);
    load_floats<Pairs, Access>(row + half, angles.sine);
  } else {
#pragma unroll
    for (int i = 0; i < Pairs; ++i) angles.cosine[i] = angles.sine[i] = nanf("");
  }
  return angles;
}

// Written with fmaf so that every compiler, the host's too, rounds at the same two places.
__device__ __forceinline__ void rotate_pair(float& even, float& odd, float cosine, float sine) {
  const float x = even, y = odd;
  even = fmaf(x, cosine, -(y * sine));
  odd = fmaf(x, sine, y * cosine);
}

template <int Count>
__device__ __forceinline__ void rotate_pairs(float (&values)[Count],
                                             const Angles<Count / 2>& angles) {
#pragma unroll
  for (int i = 0; i < Count / 2; ++i) {
    rotate_pair(values[2 * i], values[2 * i + 1], angles.cosine[i], angles.sine[i]);
  }
}

template <class Scalar, int BYTES>
__device__ __forceinline__ Vector<BYTES> rotate(
    const Vector<BYTES>& from, const Angles<BYTES / int(sizeof(Scalar)) / 2>& angles) {
  float values[BYTES / sizeof(Scalar)];
  unpack<Scalar, BYTES>(from, values);
  rotate_pairs(values, angles);
  return pack<Scalar, BYTES>(values);
}
