// Values of a token in groups that share a scale. A power of two of threads side by side have a
// group: they load it once and find its largest magnitude by shuffles.
#pragma once
#include "cache_write.cuh"
#include "fp8_heads.cuh"

constexpr int PIECES = GROUP / COUNT;  // of COUNT values that a thread loads at a time

constexpr int lanes_for(int pieces) {
  int lanes = 1;
  while (lanes < pieces && lanes < 32) lanes *= 2;
  return lanes;
}
constexpr int LANES = lanes_for(PIECES);
constexpr int PER_LANE = (PIECES + LANES - 1) / LANES;
constexpr int AT_A_TIME = THREADS / LANES;  // groups of a block

// What a thread has of a group: some pieces, each LANES from the one before; zeros beyond the last.
struct GroupPart {
  int lane;
  float values[PER_LANE][COUNT];
  float amax;   // of the finite values of the whole group
  bool finite;  // all values of the thread are

  // The largest magnitude of the whole group; what is not finite counts for nothing if FiniteOnly.
  template <bool FiniteOnly> __device__ __forceinline__ float largest() const {
    float most = 0.0f;
#pragma unroll
    for (int k = 0; k < PER_LANE; ++k) {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        const float magnitude = fabsf(values[k][i]);
        if (!FiniteOnly || isfinite(magnitude)) most = fmaxf(most, magnitude);
      }
    }
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) {
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));
    }
    return most;
  }

  // By all threads of a warp. One sum tells whether any value is not finite, which is rare.
  __device__ __forceinline__ void find_amax() {
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < PER_LANE; ++k) {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) sum = fmaf(values[k][i], 0.0f, sum);
    }
    finite = !isnan(sum);
    amax = __any_sync(0xffffffffu, !finite) ? largest<true>() : largest<false>();
  }

  __device__ __forceinline__ void drop_nans() {
    if (finite) return;
#pragma unroll
    for (int k = 0; k < PER_LANE; ++k) {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        if (isnan(values[k][i])) values[k][i] = 0.0f;
      }
    }
  }

  // Calls store(column, quotients) for each piece. The quotients are on the same side of every tie
  // between two codes of E4M3, and of E2M1, as IEEE's. `small` says that none is infinite or far
  // beyond the largest code.
  template <class Store>
  __device__ __forceinline__ void divide(float divisor, bool small, const Store& store) const {
    const Divisor by(divisor);
#pragma unroll
    for (int k = 0; k < PER_LANE; ++k) {
      const int piece = lane + LANES * k;
      if (piece < PIECES) {
        float quotients[COUNT];
        if (small) {
          by.divide<true>(values[k], quotients);
        } else {
          by.divide<false>(values[k], quotients);
        }
        store(piece * COUNT, quotients);
      }
    }
  }
};

// Calls quantize(group, part) for each group of a token that the thread has a part of, with loads
// of IN_FLIGHT groups under way. All threads of a block are to call it.
template <class Quantize>
__device__ __forceinline__ void walk_groups(const char* token, int groups,
                                            const Quantize& quantize) {
  GroupPart part;
  part.lane = threadIdx.x % LANES;
  const int first = blockIdx.y * (AT_A_TIME * IN_FLIGHT) + threadIdx.x / LANES;
  Elements<ELEMENT, COUNT> loaded[IN_FLIGHT][PER_LANE];
#pragma unroll
  for (int i = 0; i < IN_FLIGHT; ++i) {
    const int group = first + AT_A_TIME * i;
#pragma unroll
    for (int k = 0; k < PER_LANE; ++k) {
      const int piece = part.lane + LANES * k;
      if (group < groups && piece < PIECES) {
        const long long column = group * (long long)GROUP + piece * COUNT;
        loaded[i][k].load(token + column * (long long)sizeof(ELEMENT));
      }
    }
  }
#pragma unroll
  for (int i = 0; i < IN_FLIGHT; ++i) {
    const int group = first + AT_A_TIME * i;
#pragma unroll
    for (int k = 0; k < PER_LANE; ++k) {
      if (group < groups && part.lane + LANES * k < PIECES) {
        loaded[i][k].to_floats(part.values[k]);
      } else {
#pragma unroll
        for (int j = 0; j < COUNT; ++j) part.values[k][j] = 0.0f;
      }
    }
    part.find_amax();
    if (group < groups) quantize(group, part);
  }
}
