// A block a tile of rows as one flat run of pieces; the rows' offsets go to shared memory once. The
// bound on blocks keeps the compiler from spilling for more of them.
#include "overlap.cuh"
#include "restore.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 10)
    restore_tile(const char* __restrict__ cache, long long page_stride, long long row_stride,
                 int block_size, int num_blocks, const int* __restrict__ block_table,
                 long long table_stride, int columns, const int* __restrict__ cu_seq_lens,
                 int request_count, const int* __restrict__ seq_starts, char* __restrict__ out,
                 long long out_stride, long long num_tokens, const float* __restrict__ k_scale) {
  wait_for_previous_kernel();
  __shared__ long long offsets[ROWS];
  const float scale = tensor_scale(k_scale);
  const long long first_row = blockIdx.x * (long long)ROWS;
  const PagedCache paged = {page_stride, row_stride,  block_size, num_blocks,
                            block_table, table_stride, columns};
  const Requests requests = {cu_seq_lens, request_count, seq_starts};
  bool found = true;
  if (threadIdx.x < 32) {
    const long long left = num_tokens - first_row;
    const long long offset =
        row_offset_by_warp(paged, requests, first_row, left < ROWS ? left : ROWS);
    if (threadIdx.x < ROWS) {
      offsets[threadIdx.x] = offset;
      found = offset >= 0;
    }
  }
  const bool all_found = __syncthreads_and(found);
  const auto offset_of = [&](int row) { return offsets[row]; };
  restore_rows<ROWS, THREADS, MAX_IN_FLIGHT>(cache, offset_of, all_found, scale,
                                             out + first_row * out_stride, out_stride,
                                             threadIdx.x);
}
