// From values to the codes and scales of a packed cache row, byte for byte as
// sandbox/cache_formats has them.
#pragma once
#include "cache_format.cuh"

constexpr bool scaled_per_token(CacheFormat format) {
  return format == INT8_PER_TOKEN || format == INT4_PER_TOKEN;
}
constexpr int codes_a_byte(CacheFormat format) { return format == INT4_PER_TOKEN ? 2 : 1; }

// Quotients by one number, without a division each. The product with the reciprocal, corrected by
// its exact remainder, is on the same side of every tie between two codes as the IEEE quotient: of
// all pairs of floats those near a tie were tried. `prescale` keeps all that counts far from
// underflow. Quotients beyond all codes, infinity too, stay so where values are not `Bounded`.
struct Divisor {
  float divisor, reciprocal, prescale;

  __device__ __forceinline__ explicit Divisor(float scale) {
    const float magnitude = fabsf(scale);
    prescale = magnitude < 0x1p-80f ? 0x1p96f : magnitude > 0x1p120f ? 0x1p-64f : 1.0f;
    divisor = scale * prescale;
    reciprocal = 1.0f / divisor;
  }

  template <bool Bounded, int Count>
  __device__ __forceinline__ void divide(const float (&values)[Count],
                                         float (&quotients)[Count]) const {
#pragma unroll
    for (int i = 0; i < Count; ++i) quotients[i] = values[i];
    if (prescale != 1.0f) {
#pragma unroll
      for (int i = 0; i < Count; ++i) quotients[i] *= prescale;
    }
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      const float value = quotients[i];
      float estimate = value * reciprocal;
      if (!Bounded) estimate = fminf(fmaxf(estimate, -0x1p17f), 0x1p17f);
      quotients[i] = fmaf(-fmaf(estimate, divisor, -value), reciprocal, estimate);
    }
  }
};

// The bits of |value|, which are ordered as magnitudes are, with infinity and NaNs on top.
constexpr unsigned int INFINITE = 0x7f800000u;
__device__ __forceinline__ unsigned int magnitude(float value) {
  return __float_as_uint(value) & 0x7fffffffu;
}
__device__ __forceinline__ unsigned int finite_magnitude(float value) {
  return magnitude(value) < INFINITE ? magnitude(value) : 0u;
}

// The descale of a tile, a latent or a key whose largest magnitude has the bits `amax`; in a tile
// only finite values count.
template <CacheFormat Format, bool Pow2>
__device__ __forceinline__ float scale_of(unsigned int amax) {
  if constexpr (Format == FP8_DS_MLA && Pow2) {
    // The least exponent e, -13 or more, with 448 * 2^e >= amax; 448 is 1.75 * 2^8.
    const unsigned int exponent = max((amax + 0x1fffffu) >> 23, 127u - 13u + 8u) - 8u;
    return __uint_as_float(exponent << 23);
  } else {
    constexpr float LARGEST = Format == FP8_DS_MLA       ? 448.0f
                              : Format == INT8_PER_TOKEN ? 127.0f
                                                         : 7.0f;
    constexpr float RECIPROCAL = 1.0f / LARGEST;
    if (amax >= INFINITE) return __uint_as_float(0x7fc00000u);
    // The IEEE quotient, by the same correction, tried for every float.
    const float value = __uint_as_float(amax), estimate = value * RECIPROCAL;
    const float quotient = fmaf(-fmaf(estimate, LARGEST, -value), RECIPROCAL, estimate);
    return fmaxf(quotient, 0x1p-126f);
  }
}

// The low byte of each word, in memory order.
template <int Count>
__device__ __forceinline__ Vector<Count> low_bytes(const unsigned int (&words)[Count]) {
  Vector<Count> to;
  if constexpr (Count == 1) {
    to = (unsigned char)words[0];
  } else {
    constexpr int WORDS = (Count + 3) / 4;
    unsigned int joined[WORDS];
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      joined[i] = __byte_perm(words[4 * i], words[4 * i + 1], 0x0040);
      if constexpr (Count > 2) {
        const unsigned int upper = __byte_perm(words[4 * i + 2], words[4 * i + 3], 0x0040);
        joined[i] = __byte_perm(joined[i], upper, 0x5410);
      }
    }
    memcpy(&to, joined, Count);
  }
  return to;
}

// Codes of values that share a scale.
template <CacheFormat Format, bool Pow2> struct Coder {
  float scale;
  Divisor by;

  __device__ __forceinline__ explicit Coder(float scale) : scale(scale), by(scale) {}

  // Count codes in memory order.
  template <int Count>
  __device__ __forceinline__ Vector<Count / codes_a_byte(Format)> operator()(
      const float (&values)[Count]) const {
    float quotients[Count];
    by.template divide<scaled_per_token(Format)>(values, quotients);
    if constexpr (scaled_per_token(Format)) {
      return integers(quotients);
    } else {
      return pack_fp8<fp8_kind(Format), Count>(quotients);
    }
  }

 private:
  template <int Count>
  __device__ __forceinline__ Vector<Count / codes_a_byte(Format)> integers(
      const float (&quotients)[Count]) const {
    constexpr int BYTES = Count / codes_a_byte(Format);
    if (isnan(scale)) return Vector<BYTES>();
    unsigned int codes[Count];
#pragma unroll
    for (int i = 0; i < Count; ++i) {  // where a float's last place is worth 1
      codes[i] = __float_as_uint(quotients[i] + 0x1.8p23f);
    }
    if constexpr (Format == INT8_PER_TOKEN) {
      return low_bytes(codes);
    } else {
      unsigned int pairs[BYTES];
#pragma unroll
      for (int i = 0; i < BYTES; ++i) pairs[i] = (codes[2 * i] & 15u) | codes[2 * i + 1] << 4;
      return low_bytes(pairs);
    }
  }
};

// A power of two has an exact reciprocal.
template <> struct Coder<FP8_DS_MLA, true> {
  float scale, reciprocal;

  __device__ __forceinline__ explicit Coder(float scale)
      : scale(scale), reciprocal(__uint_as_float((254u << 23) - __float_as_uint(scale))) {}

  template <int Count>
  __device__ __forceinline__ Vector<Count> operator()(const float (&values)[Count]) const {
    float quotients[Count];
#pragma unroll
    for (int i = 0; i < Count; ++i) quotients[i] = values[i] * reciprocal;
    return pack_fp8<E4M3, Count>(quotients);
  }
};
