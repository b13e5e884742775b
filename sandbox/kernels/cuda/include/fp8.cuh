// 8-bit floats E4M3 and E5M2 by the pair and by the vector, on every architecture.
//
// To a code: to nearest, ties to even, saturating (infinities too); a NaN becomes 0x7F whatever its
// sign. From a code: exactly. Where the GPU has no instruction for it (before sm_89) and on the host
// the same is done in integers.
#pragma once
#include "scalar.cuh"

enum Fp8Kind { E4M3, E5M2 };

#if !defined(SANDBOX_HOST) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define FP8_INSTRUCTIONS 1
#else
#define FP8_INSTRUCTIONS 0
#endif

#if FP8_INSTRUCTIONS

// The code of `low` in the low byte, that of `high` above it.
template <Fp8Kind Kind>
__device__ __forceinline__ unsigned short fp8_from_floats(float low, float high) {
  unsigned short codes;
  if constexpr (Kind == E4M3) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  }
  return codes;
}

template <Fp8Kind Kind> __device__ __forceinline__ float2 floats_from_fp8(unsigned short codes) {
  unsigned int halves;
  if constexpr (Kind == E4M3) {
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
  } else {
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(codes));
  }
  __half2 pair;
  memcpy(&pair, &halves, sizeof(pair));
  return __half22float2(pair);
}

#else

template <Fp8Kind Kind> __device__ __forceinline__ unsigned int fp8_from_float(float value) {
  constexpr int MANTISSA = Kind == E4M3 ? 3 : 2;
  constexpr int LEAST_EXPONENT = Kind == E4M3 ? -6 : -14;  // of a normal number
  constexpr float LARGEST = Kind == E4M3 ? 448.0f : 57344.0f;
  const unsigned int bits = __float_as_uint(value);
  const unsigned int magnitude_bits = bits & 0x7fffffffu;
  if (magnitude_bits > 0x7f800000u) return 0x7fu;
  const float magnitude = fminf(__uint_as_float(magnitude_bits), LARGEST);
  const int exponent = max(int(__float_as_uint(magnitude) >> 23) - 127, LEAST_EXPONENT);
  const float steps_a_unit = __uint_as_float((unsigned int)(MANTISSA - exponent + 127) << 23);
  const int steps = __float2int_rn(magnitude * steps_a_unit);
  return (unsigned int)(((exponent - LEAST_EXPONENT) << MANTISSA) + steps) | (bits >> 24 & 0x80u);
}

template <Fp8Kind Kind>
__device__ __forceinline__ unsigned short fp8_from_floats(float low, float high) {
  return (unsigned short)(fp8_from_float<Kind>(low) | fp8_from_float<Kind>(high) << 8);
}

// The code's bits stand at the place of a float's; a power of two makes up for the exponents' bias,
// subnormal codes included.
template <Fp8Kind Kind> __device__ __forceinline__ float float_from_fp8(unsigned int code) {
  constexpr int MANTISSA = Kind == E4M3 ? 3 : 2;
  constexpr unsigned int BIAS_BITS = Kind == E4M3 ? 0x7b800000u : 0x77800000u;  // 2^120, 2^112
  const unsigned int magnitude = code & 0x7fu;
  const unsigned int sign = (code & 0x80u) << 24;
  if (Kind == E4M3 ? magnitude == 0x7fu : magnitude > 0x7cu) return __uint_as_float(0x7fc00000u);
  if (Kind == E5M2 && magnitude == 0x7cu) return __uint_as_float(sign | 0x7f800000u);
  const float scaled = __uint_as_float(magnitude << (23 - MANTISSA)) * __uint_as_float(BIAS_BITS);
  return __uint_as_float(sign | __float_as_uint(scaled));
}

template <Fp8Kind Kind> __device__ __forceinline__ float2 floats_from_fp8(unsigned short codes) {
  return make_float2(float_from_fp8<Kind>(codes & 0xffu), float_from_fp8<Kind>(codes >> 8));
}

#endif

// Count values to Count codes, in memory order; Count is 1, 2, 4, 8 or 16.
template <Fp8Kind Kind, int Count>
__device__ __forceinline__ Vector<Count> pack_fp8(const float (&from)[Count]) {
  Vector<Count> to;
  if constexpr (Count == 1) {
    to = (unsigned char)fp8_from_floats<Kind>(from[0], from[0]);
  } else {
    unsigned short codes[Count / 2];
#pragma unroll
    for (int i = 0; i < Count / 2; ++i) {
      codes[i] = fp8_from_floats<Kind>(from[2 * i], from[2 * i + 1]);
    }
    memcpy(&to, codes, Count);
  }
  return to;
}

template <Fp8Kind Kind, int Count>
__device__ __forceinline__ void unpack_fp8(const Vector<Count>& from, float (&to)[Count]) {
  if constexpr (Count == 1) {
    to[0] = floats_from_fp8<Kind>(from).x;
  } else {
    unsigned short codes[Count / 2];
    memcpy(codes, &from, Count);
#pragma unroll
    for (int i = 0; i < Count / 2; ++i) {
      const float2 pair = floats_from_fp8<Kind>(codes[i]);
      to[2 * i] = pair.x;
      to[2 * i + 1] = pair.y;
    }
  }
}

// E4M3 codes of a head's values, times the reciprocal of their descale.
template <int Count>
__device__ __forceinline__ Vector<Count> head_codes(const float (&values)[Count],
                                                    float reciprocal) {
  float scaled[Count];
#pragma unroll
  for (int i = 0; i < Count; ++i) scaled[i] = values[i] * reciprocal;
  return pack_fp8<E4M3, Count>(scaled);
}
