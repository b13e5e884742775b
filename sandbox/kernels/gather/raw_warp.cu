// A warp a row: the warp looks its row up once, each lane has several vector loads in flight.
#include "paged.cuh"
#include "vector.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    gather_warp(const void* __restrict__ cache, long long page_stride,
                long long row_stride, int block_size, int num_blocks,
                const int* __restrict__ block_table, long long table_stride, int columns,
                const int* __restrict__ cu_seq_lens, int requests,
                const int* __restrict__ seq_starts, void* __restrict__ out,
                long long out_stride, long long num_tokens) {
  constexpr int VECTORS = ROW_BYTES / VECTOR;
  constexpr int PER_LANE = (VECTORS + 31) / 32;
  constexpr int IN_FLIGHT = PER_LANE < 4 ? PER_LANE : 4;
  const int lane = threadIdx.x & 31;
  const long long row = blockIdx.x * (long long)(THREADS / 32) + (threadIdx.x >> 5);
  if (row >= num_tokens) return;
  const PagedCache paged = {page_stride, row_stride, block_size, num_blocks,
                            block_table, table_stride, columns};
  const long long offset = row_offset(paged, row, cu_seq_lens, requests, seq_starts);
  if (offset == ROW_NOT_OWNED) return;
  const char* from = static_cast<const char*>(cache) + (offset < 0 ? 0 : offset);
  char* to = static_cast<char*>(out) + row * out_stride;
#pragma unroll 1
  for (int first = lane; first < VECTORS; first += 32 * IN_FLIGHT) {
    Vector<VECTOR> values[IN_FLIGHT] = {};
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      const int vector = first + 32 * i;
      if (vector < VECTORS && offset >= 0) values[i] = load_once<VECTOR>(from + vector * VECTOR);
    }
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      const int vector = first + 32 * i;
      if (vector < VECTORS) store_once<VECTOR>(to + vector * VECTOR, values[i]);
    }
  }
}
