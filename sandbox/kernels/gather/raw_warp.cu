// A warp a few rows, as one flat run of vectors: no block-wide barrier, a search by all lanes
// together, all loads of a pass in flight at once.
#include "paged.cuh"
#include "overlap.cuh"
#include "vector.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    gather_warp(const void* __restrict__ cache, long long page_stride, long long row_stride,
                int block_size, int num_blocks, const int* __restrict__ block_table,
                long long table_stride, int columns, const int* __restrict__ cu_seq_lens,
                int request_count, const int* __restrict__ seq_starts, void* __restrict__ out,
                long long out_stride, long long num_tokens) {
  wait_for_previous_kernel();
  constexpr int VECTORS = ROW_BYTES / VECTOR;
  constexpr int TILE = ROWS * VECTORS;
  constexpr int PASSES = (TILE + 32 * MAX_IN_FLIGHT - 1) / (32 * MAX_IN_FLIGHT);
  constexpr int IN_FLIGHT = (TILE + 32 * PASSES - 1) / (32 * PASSES);
  const int lane = threadIdx.x & 31;
  const long long first_row =
      (blockIdx.x * (long long)(THREADS / 32) + (threadIdx.x >> 5)) * ROWS;
  if (first_row >= num_tokens) return;
  const PagedCache paged = {page_stride, row_stride,  block_size, num_blocks,
                            block_table, table_stride, columns};
  const Requests requests = {cu_seq_lens, request_count, seq_starts};
  const long long left = num_tokens - first_row;
  const long long mine =
      row_offset_by_warp(paged, requests, first_row, left < ROWS ? left : ROWS);
  const char* pages = static_cast<const char*>(cache);
  char* tile = static_cast<char*>(out) + first_row * out_stride;
#pragma unroll 1
  for (int pass = 0; pass < PASSES; ++pass) {
    Vector<VECTOR> values[IN_FLIGHT] = {};
    long long offsets[IN_FLIGHT];
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      const int vector = lane + 32 * (i + IN_FLIGHT * pass);
      const int row = vector / VECTORS;
      offsets[i] = __shfl_sync(0xffffffffu, mine, row < ROWS ? row : 0);
      if (row >= ROWS) offsets[i] = ROW_NOT_OWNED;
      if (offsets[i] >= 0) {
        values[i] = load_once<VECTOR>(pages + offsets[i] + (vector - row * VECTORS) * VECTOR);
      }
    }
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      const int vector = lane + 32 * (i + IN_FLIGHT * pass);
      const int row = vector / VECTORS;
      if (offsets[i] != ROW_NOT_OWNED) {
        store_once<VECTOR>(tile + row * out_stride + (vector - row * VECTORS) * VECTOR, values[i]);
      }
    }
  }
}
