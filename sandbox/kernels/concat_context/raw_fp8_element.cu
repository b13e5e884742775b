// One thread an element of any key or value.
#include "fp8.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    concat_fp8_element(const char* k_nope, long long k_nope_token_stride,
                       long long k_nope_head_stride, const char* k_pe, long long k_pe_stride,
                       const char* v, long long v_token_stride, long long v_head_stride,
                       const float* k_descale, const float* v_descale, char* k_out,
                       long long k_out_token_stride, long long k_out_head_stride, char* v_out,
                       long long v_out_token_stride, long long v_out_head_stride,
                       long long elements) {
  constexpr int KEY = NOPE + ROPE;
  constexpr int HEAD = KEY + VALUE;
  constexpr int SIZE = int(sizeof(ELEMENT));
  const long long index = blockIdx.x * (long long)THREADS + threadIdx.x;
  if (index >= elements) return;
  const long long token = index / (HEADS * HEAD);
  const int place = (int)(index - token * (HEADS * HEAD));
  const int head = place / HEAD;
  const int column = place - head * HEAD;
  const char* from;
  char* to;
  if (column < KEY) {
    from = column < NOPE
               ? k_nope + token * k_nope_token_stride + head * k_nope_head_stride + column * SIZE
               : k_pe + token * k_pe_stride + (column - NOPE) * SIZE;
    to = k_out + token * k_out_token_stride + head * k_out_head_stride + column;
  } else {
    from = v + token * v_token_stride + head * v_head_stride + (column - KEY) * SIZE;
    to = v_out + token * v_out_token_stride + head * v_out_head_stride + (column - KEY);
  }
  const float descale = column < KEY ? *k_descale : *v_descale;
  const float value[1] = {to_float(*reinterpret_cast<const ELEMENT*>(from)) * (1.0f / descale)};
  *reinterpret_cast<Vector<1>*>(to) = pack_fp8<E4M3, 1>(value);
}
