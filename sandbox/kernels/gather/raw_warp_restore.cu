// A warp a few rows, as one flat run of pieces: no block-wide barrier, a search by all lanes
// together, the rows' offsets passed by shuffles.
#include "overlap.cuh"
#include "restore.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    restore_warp(const char* __restrict__ cache, long long page_stride, long long row_stride,
                 int block_size, int num_blocks, const int* __restrict__ block_table,
                 long long table_stride, int columns, const int* __restrict__ cu_seq_lens,
                 int request_count, const int* __restrict__ seq_starts, char* __restrict__ out,
                 long long out_stride, long long num_tokens, const float* __restrict__ k_scale) {
  wait_for_previous_kernel();
  const long long first_row =
      (blockIdx.x * (long long)(THREADS / 32) + (threadIdx.x >> 5)) * ROWS;
  if (first_row >= num_tokens) return;
  const float scale = tensor_scale(k_scale);
  const PagedCache paged = {page_stride, row_stride,  block_size, num_blocks,
                            block_table, table_stride, columns};
  const Requests requests = {cu_seq_lens, request_count, seq_starts};
  const long long left = num_tokens - first_row;
  const long long mine =
      row_offset_by_warp(paged, requests, first_row, left < ROWS ? left : ROWS);
  const int lane = threadIdx.x & 31;
  const bool all_found = __all_sync(0xffffffffu, lane >= ROWS || mine >= 0);
  const auto offset_of = [mine](int row) { return __shfl_sync(0xffffffffu, mine, row); };
  restore_rows<ROWS, 32, MAX_IN_FLIGHT>(cache, offset_of, all_found, scale,
                                        out + first_row * out_stride, out_stride, lane);
}
