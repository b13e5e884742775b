// A block a tile of rows: the rows' offsets go to shared memory once, then the tile is one flat run
// of vectors, so that all threads are busy whatever the row's width, with many loads in flight.
#include "paged.cuh"
#include "overlap.cuh"
#include "vector.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    gather_tile(const void* __restrict__ cache, long long page_stride,
                long long row_stride, int block_size, int num_blocks,
                const int* __restrict__ block_table, long long table_stride, int columns,
                const int* __restrict__ cu_seq_lens, int request_count,
                const int* __restrict__ seq_starts, void* __restrict__ out,
                long long out_stride, long long num_tokens) {
  wait_for_previous_kernel();
  constexpr int VECTORS = ROW_BYTES / VECTOR;
  constexpr int TILE = ROWS * VECTORS;
  __shared__ long long offsets[ROWS];
  const long long first_row = blockIdx.x * (long long)ROWS;
  const PagedCache paged = {page_stride, row_stride,  block_size, num_blocks,
                            block_table, table_stride, columns};
  const Requests requests = {cu_seq_lens, request_count, seq_starts};
  if (threadIdx.x < 32) {
    const long long left = num_tokens - first_row;
    const long long offset =
        row_offset_by_warp(paged, requests, first_row, left < ROWS ? left : ROWS);
    if (threadIdx.x < ROWS) offsets[threadIdx.x] = offset;
  }
  __syncthreads();
  const char* pages = static_cast<const char*>(cache);
  char* tile = static_cast<char*>(out) + first_row * out_stride;
#pragma unroll 1
  for (int first = threadIdx.x; first < TILE; first += THREADS * IN_FLIGHT) {
    Vector<VECTOR> values[IN_FLIGHT] = {};
    int rows[IN_FLIGHT];
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      const int vector = first + THREADS * i;
      rows[i] = vector < TILE ? vector / VECTORS : ROWS;
      if (rows[i] < ROWS && offsets[rows[i]] >= 0) {
        const int column = vector - rows[i] * VECTORS;
        values[i] = load_once<VECTOR>(pages + offsets[rows[i]] + column * VECTOR);
      }
    }
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      if (rows[i] < ROWS && offsets[rows[i]] != ROW_NOT_OWNED) {
        const int column = first + THREADS * i - rows[i] * VECTORS;
        store_once<VECTOR>(tile + rows[i] * out_stride + column * VECTOR, values[i]);
      }
    }
  }
}
