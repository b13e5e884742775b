// Two partial attention states of one (token, head) row: where they stand, how they weigh.
#pragma once
#include "fp8.cuh"

// In elements.
struct RowStrides {
  long long token, head;
  __device__ __forceinline__ long long operator()(long long t, int h) const {
    return t * token + h * head;
  }
};

enum Packed { STRIDED, PACKED_NT, PACKED_TN };  // as launch.py has it

#if PACKED == 0
struct MergeStrides {
  RowStrides prefix, prefix_lse, suffix, suffix_lse, out, out_lse;
};
#else
// Arrays without padding need one number instead of twelve. A short kernel waits for its parameters,
// line by line, and then for the multiplications.
struct MergeStrides {
  long long tokens;
  static __device__ __forceinline__ long long state(long long t, int h) {
    return (t * HEADS + h) * HEAD_DIM;
  }
  __device__ __forceinline__ long long lse(long long t, int h) const {
    return PACKED == PACKED_NT ? h * tokens + t : t * HEADS + h;
  }
  __device__ __forceinline__ long long prefix(long long t, int h) const { return state(t, h); }
  __device__ __forceinline__ long long suffix(long long t, int h) const { return state(t, h); }
  __device__ __forceinline__ long long out(long long t, int h) const { return state(t, h); }
  __device__ __forceinline__ long long prefix_lse(long long t, int h) const { return lse(t, h); }
  __device__ __forceinline__ long long suffix_lse(long long t, int h) const { return lse(t, h); }
  __device__ __forceinline__ long long out_lse(long long t, int h) const { return lse(t, h); }
};
#endif

#define NO_LSE __int_as_float(0xff800000)  // -inf

enum Source { BOTH, PREFIX, SUFFIX, NEITHER };

// What a merged row is made of; an empty side is never multiplied, since it may hold NaN.
struct __align__(16) MergeWeights {
  float prefix, suffix, lse;
  Source source;
};

// `to_natural` turns an LSE into a natural logarithm, `from_natural` does the reverse.
__device__ __forceinline__ MergeWeights weigh(float prefix_lse, float suffix_lse, float to_natural,
                                              float from_natural) {
  const float less = expf(-fabsf(prefix_lse - suffix_lse) * to_natural);  // the other has weight 1
  const float total = 1.0f + less;
  const float major = __fdividef(1.0f, total), minor = less * major;  // total is in 1 to 2
  const bool prefix_leads = prefix_lse >= suffix_lse;
  MergeWeights weights;
  weights.prefix = prefix_leads ? major : minor;
  weights.suffix = prefix_leads ? minor : major;
  weights.lse = fmaxf(prefix_lse, suffix_lse) + logf(total) * from_natural;
  weights.source = BOTH;
  const bool no_prefix = isinf(prefix_lse), no_suffix = isinf(suffix_lse);
  if (no_prefix && no_suffix) {
    weights.lse = NO_LSE;
    weights.source = NEITHER;
  } else if (no_prefix && !isnan(suffix_lse)) {
    weights.lse = suffix_lse;
    weights.source = SUFFIX;
  } else if (no_suffix && !isnan(prefix_lse)) {
    weights.lse = prefix_lse;
    weights.source = PREFIX;
  }
  return weights;
}

template <class Result> constexpr bool IS_CODE = sizeof(Result) == 1;

// Vectors of Count elements, one width or another by their type.
template <class Element, int Count> using Elements = Vector<Count * int(sizeof(Element))>;

// The descale of codes; other results have none, and nothing is read.
template <class Result> __device__ __forceinline__ float load_scale(const float* output_scale) {
  if constexpr (IS_CODE<Result>) {
    return *output_scale;
  } else {
    return 1.0f;
  }
}

// Each value rounded once: to 16 or 32 bits, or to the E4M3 code of value * inverse.
template <class Result, int Count>
__device__ __forceinline__ Elements<Result, Count> rounded(float (&values)[Count], float inverse) {
  if constexpr (IS_CODE<Result>) {
#pragma unroll
    for (int i = 0; i < Count; ++i) values[i] *= inverse;
    return pack_fp8<E4M3, Count>(values);
  } else {
    return pack<Result, int(sizeof(Elements<Result, Count>))>(values);
  }
}

template <class Element, class Result, int Count>
__device__ __forceinline__ Elements<Result, Count> merged(const MergeWeights& weights,
                                                          const Elements<Element, Count>& prefix,
                                                          const Elements<Element, Count>& suffix,
                                                          float inverse) {
  if constexpr (!IS_CODE<Result>) {
    if (weights.source == PREFIX) return prefix;
    if (weights.source == SUFFIX) return suffix;
  }
  if (weights.source == NEITHER) return Elements<Result, Count>{};
  float left[Count], right[Count];
  unpack<Element, int(sizeof(prefix))>(prefix, left);
  unpack<Element, int(sizeof(suffix))>(suffix, right);
  const bool mixed = !IS_CODE<Result> || weights.source == BOTH;
#pragma unroll
  for (int i = 0; i < Count; ++i) {
    const float mean = weights.prefix * left[i] + weights.suffix * right[i];
    left[i] = mixed ? mean : weights.source == PREFIX ? left[i] : right[i];
  }
  return rounded<Result, Count>(left, inverse);
}

// Lanes that share a row of so many vectors: a power of two, so that no row lies in two warps.
constexpr int lanes_for(int vectors) {
  int lanes = 1;
  while (lanes < vectors && lanes < 32) lanes *= 2;
  return lanes;
}

// Load of what passes through once, not by the read-only path: the output may be the very row read.
template <int BYTES> __device__ __forceinline__ Vector<BYTES> stream_in(const void* address) {
  return __ldcs(static_cast<const Vector<BYTES>*>(address));
}
