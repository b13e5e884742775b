// From values to the codes and scales of a packed cache row, byte for byte as
// sandbox/cache_formats has them.
#pragma once
#include "cache_format.cuh"

constexpr bool scaled_per_token(CacheFormat format) {
  return format == INT8_PER_TOKEN || format == INT4_PER_TOKEN;
}
constexpr int codes_a_byte(CacheFormat format) { return format == INT4_PER_TOKEN ? 2 : 1; }

// The bits of |value|, which are ordered as magnitudes are, with infinity and NaNs on top; where a
// scale is that of the finite values only, 0 for those.
template <CacheFormat Format> __device__ __forceinline__ unsigned int magnitude(float value) {
  const unsigned int bits = __float_as_uint(value) & 0x7fffffffu;
  return Format == FP8_DS_MLA && bits >= 0x7f800000u ? 0u : bits;
}

// The descale of a tile, a latent or a key whose largest magnitude has the bits `amax`.
template <CacheFormat Format, bool Pow2>
__device__ __forceinline__ float scale_of(unsigned int amax) {
  constexpr float LEAST = 1.17549435e-38f;  // of the normal numbers
  if constexpr (Format == FP8_DS_MLA && Pow2) {
    // The least exponent e with 448 * 2^e >= amax, 448 being 1.75 * 2^8; at least -13.
    const unsigned int exponent = max((amax + 0x1fffffu) >> 23, 127u - 13u + 8u) - 8u;
    return __uint_as_float(exponent << 23);
  } else {
    constexpr float LARGEST = Format == FP8_DS_MLA ? 448.0f : Format == INT8_PER_TOKEN ? 127.0f : 7.0f;
    if (amax >= 0x7f800000u) return __uint_as_float(0x7fc00000u);
    return fmaxf(__uint_as_float(amax) / LARGEST, LEAST);
  }
}

// Codes of Count values, in memory order.
template <CacheFormat Format, bool Pow2, int Count>
__device__ __forceinline__ Vector<Count / codes_a_byte(Format)> codes_of(
    const float (&values)[Count], float scale) {
  if constexpr (scaled_per_token(Format)) {
    int codes[Count];
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      codes[i] = isnan(scale) ? 0 : __float2int_rn(values[i] / scale);
    }
    unsigned char bytes[Count / codes_a_byte(Format)];
#pragma unroll
    for (int i = 0; i < Count / codes_a_byte(Format); ++i) {
      bytes[i] = Format == INT8_PER_TOKEN
                     ? (unsigned char)codes[i]
                     : (unsigned char)((codes[2 * i] & 15) | (codes[2 * i + 1] & 15) << 4);
    }
    Vector<Count / codes_a_byte(Format)> to;
    memcpy(&to, bytes, sizeof(to));
    return to;
  } else {
    float quotients[Count];
#pragma unroll
    for (int i = 0; i < Count; ++i) quotients[i] = values[i] / scale;
    return pack_fp8<fp8_kind(Format), Count>(quotients);
  }
}
