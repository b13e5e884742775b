// A block a token copies COLUMNS of each of its heads.
#include "cache_row.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    copy_columns(const char* __restrict__ from, long long from_token_stride,
                 long long from_head_stride, char* __restrict__ to, long long to_token_stride,
                 long long to_head_stride) {
  constexpr int VECTORS = COLUMN_BYTES / VECTOR;
  from += blockIdx.x * from_token_stride;
  to += blockIdx.x * to_token_stride;
  for (int i = threadIdx.x; i < HEADS * VECTORS; i += THREADS) {
    const int head = i / VECTORS;
    const int offset = (i - head * VECTORS) * VECTOR;
    store_once<VECTOR>(to + head * to_head_stride + offset,
                       load_once<VECTOR>(from + head * from_head_stride + offset));
  }
}
