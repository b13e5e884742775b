// Elements of 16 and 32 bits as floats, one by one and by the vector.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "vector.cuh"

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

// Rounded to nearest, ties to even.
template <class Scalar> __device__ __forceinline__ Scalar from_float(float value);
template <> __device__ __forceinline__ float from_float<float>(float value) { return value; }
template <> __device__ __forceinline__ __half from_float<__half>(float value) {
  return __float2half_rn(value);
}
template <> __device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

// The elements that a vector holds, in memory order.
template <class Scalar, int BYTES>
__device__ __forceinline__ void unpack(const Vector<BYTES>& from,
                                       float (&to)[BYTES / sizeof(Scalar)]) {
  Scalar values[BYTES / sizeof(Scalar)];
  memcpy(values, &from, BYTES);
#pragma unroll
  for (int i = 0; i < BYTES / int(sizeof(Scalar)); ++i) to[i] = to_float(values[i]);
}

template <class Scalar, int BYTES>
__device__ __forceinline__ Vector<BYTES> pack(const float (&from)[BYTES / sizeof(Scalar)]) {
  Scalar values[BYTES / sizeof(Scalar)];
#pragma unroll
  for (int i = 0; i < BYTES / int(sizeof(Scalar)); ++i) values[i] = from_float<Scalar>(from[i]);
  Vector<BYTES> to;
  memcpy(&to, values, BYTES);
  return to;
}
