// Every code to a float, and floats to codes, by vectors of COUNT.
#include "fp8.cuh"

extern "C" __global__ void encode(const float* values, unsigned char* codes, int count) {
  const int first = (blockIdx.x * blockDim.x + threadIdx.x) * COUNT;
  if (first >= count) return;
  float from[COUNT];
  memcpy(from, values + first, sizeof(from));
  const Vector<COUNT> to = pack_fp8<KIND, COUNT>(from);
  memcpy(codes + first, &to, COUNT);
}

extern "C" __global__ void decode(const unsigned char* codes, float* values, int count) {
  const int first = (blockIdx.x * blockDim.x + threadIdx.x) * COUNT;
  if (first >= count) return;
  Vector<COUNT> from;
  memcpy(&from, codes + first, COUNT);
  float to[COUNT];
  unpack_fp8<KIND, COUNT>(from, to);
  memcpy(values + first, to, sizeof(to));
}
