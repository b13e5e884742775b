// Rows to E4M3 codes, a few vectors a thread.
#include "merge.cuh"
#include "overlap.cuh"

constexpr int IN_BYTES = ELEMENTS * int(sizeof(ELEMENT));
constexpr int VECTORS = HEAD_DIM / ELEMENTS;

extern "C" __global__ void __launch_bounds__(THREADS)
    quantize_rows(const ELEMENT* from, unsigned char* to, const RowStrides strides,
                  long long tokens, const float* output_scale) {
  wait_for_previous_kernel();
  const long long first = blockIdx.x * (long long)(THREADS * IN_FLIGHT) + threadIdx.x;
  const long long end = tokens * (HEADS * VECTORS);
  Vector<IN_BYTES> values[IN_FLIGHT];
#pragma unroll
  for (int i = 0; i < IN_FLIGHT; ++i) {
    const long long vector = first + THREADS * i;
    if (vector < end) values[i] = stream_in<IN_BYTES>(from + vector * ELEMENTS);
  }
  const float inverse = 1.0f / *output_scale;
#pragma unroll
  for (int i = 0; i < IN_FLIGHT; ++i) {
    const unsigned long long vector = first + THREADS * i;
    if (vector < end) {
      const unsigned long long row = vector / VECTORS, token = row / HEADS;
      const int head = int(row - token * HEADS), column = int(vector - row * VECTORS) * ELEMENTS;
      float numbers[ELEMENTS];
      unpack<ELEMENT, IN_BYTES>(values[i], numbers);
      store_once<ELEMENTS>(to + strides(token, head) + column,
                           rounded<unsigned char, ELEMENTS>(numbers, inverse));
    }
  }
}
