// The bulk copy engine moves the rows: a lane looks up one row, loads it into shared memory and
// stores it from there. No value passes through a register.
#include "bulk.cuh"
#include "paged.cuh"
#include "vector.cuh"

extern "C" __global__ void __launch_bounds__(ROWS)
    gather_bulk(const void* __restrict__ cache, long long page_stride,
                long long row_stride, int block_size, int num_blocks,
                const int* __restrict__ block_table, long long table_stride, int columns,
                const int* __restrict__ cu_seq_lens, int request_count,
                const int* __restrict__ seq_starts, void* __restrict__ out,
                long long out_stride, long long num_tokens) {
  extern __shared__ __align__(128) unsigned char rows[];
  __shared__ BulkBarrier loaded;
  if (threadIdx.x == 0) bulk_barrier_init(&loaded, ROWS);
  const long long row = blockIdx.x * (long long)ROWS + threadIdx.x;
  const PagedCache paged = {page_stride, row_stride,  block_size, num_blocks,
                            block_table, table_stride, columns};
  const Requests requests = {cu_seq_lens, request_count, seq_starts};
  const long long offset = row < num_tokens ? row_offset(paged, requests, row) : ROW_NOT_OWNED;
  unsigned char* staged = rows + threadIdx.x * ROW_BYTES;
  char* to = static_cast<char*>(out) + row * out_stride;
  __syncthreads();
  bulk_barrier_expect(&loaded, offset >= 0 ? ROW_BYTES : 0);
  if (offset >= 0) bulk_load(staged, static_cast<const char*>(cache) + offset, ROW_BYTES, &loaded);
  if (offset == ROW_NOT_FOUND) {
    for (int i = 0; i < ROW_BYTES; i += 16) store_once<16>(to + i, make_uint4(0, 0, 0, 0));
  }
  bulk_barrier_wait(&loaded, 0);
  if (offset >= 0) bulk_store(to, staged, ROW_BYTES);
  bulk_store_drain();
}
