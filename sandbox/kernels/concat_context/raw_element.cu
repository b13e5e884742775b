// One thread an element of any key.
#include "vector.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    concat_element(const char* k_nope, long long k_nope_token_stride, long long k_nope_head_stride,
                   const char* k_pe, long long k_pe_stride, char* k_out,
                   long long k_out_token_stride, long long k_out_head_stride, long long elements) {
  constexpr int KEY = NOPE + ROPE;
  const long long index = blockIdx.x * (long long)THREADS + threadIdx.x;
  if (index >= elements) return;
  const long long token = index / (HEADS * KEY);
  const int place = (int)(index - token * (HEADS * KEY));
  const int head = place / KEY;
  const int column = place - head * KEY;
  const char* from = column < NOPE ? k_nope + token * k_nope_token_stride +
                                         head * k_nope_head_stride + column * SIZE
                                   : k_pe + token * k_pe_stride + (column - NOPE) * SIZE;
  char* to = k_out + token * k_out_token_stride + head * k_out_head_stride + column * SIZE;
  *reinterpret_cast<Vector<SIZE>*>(to) = *reinterpret_cast<const Vector<SIZE>*>(from);
}
