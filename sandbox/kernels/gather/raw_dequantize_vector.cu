// A block a tile of rows as one flat run of pieces, so that no thread idles at a row's end. With
// `cu_seq_lens` only rows that a request has are written.
#include "overlap.cuh"
#include "restore.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    dequantize_vector(const char* __restrict__ codes, long long row_stride,
                      char* __restrict__ out, long long out_stride, long long rows,
                      const float* __restrict__ k_scale, const int* __restrict__ cu_seq_lens,
                      int request_count) {
  wait_for_previous_kernel();
  const long long first_row = blockIdx.x * (long long)ROWS;
  long long first = 0, end = rows - first_row;
  if (cu_seq_lens != nullptr) {
    first = cu_seq_lens[0] - first_row;
    end = cu_seq_lens[request_count] - first_row;
  }
  const auto offset_of = [=](int row) {
    return row >= first && row < end ? row * row_stride : ROW_NOT_OWNED;
  };
  restore_rows<ROWS, THREADS, MAX_IN_FLIGHT>(
      codes + first_row * row_stride, offset_of, first <= 0 && end >= ROWS, tensor_scale(k_scale),
      out + first_row * out_stride, out_stride, threadIdx.x);
}
