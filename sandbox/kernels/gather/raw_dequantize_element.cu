// One thread a piece of one value, or of the two that share a byte.
#include "restore.cuh"

extern "C" __global__ void dequantize_element(const char* __restrict__ codes, long long row_stride,
                                              OUT* __restrict__ out, long long out_stride,
                                              long long rows, const float* __restrict__ k_scale) {
  const long long piece = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  const long long row = piece / PIECES;
  if (row >= rows) return;
  const int column = (int)(piece - row * PIECES) * COUNT;
  store_each(reinterpret_cast<char*>(out) + row * out_stride, column,
             Reader::load(codes + row * row_stride, column, tensor_scale(k_scale)));
}
