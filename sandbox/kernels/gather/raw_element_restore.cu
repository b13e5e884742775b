// One thread a piece of one value, or of the two that share a byte: every thread looks its row up
// for itself.
#include "restore.cuh"

extern "C" __global__ void restore_element(const char* __restrict__ cache, long long page_stride,
                                           long long row_stride, int block_size, int num_blocks,
                                           const int* __restrict__ block_table,
                                           long long table_stride, int columns,
                                           const int* __restrict__ cu_seq_lens, int request_count,
                                           const int* __restrict__ seq_starts,
                                           OUT* __restrict__ out, long long out_stride,
                                           long long num_tokens,
                                           const float* __restrict__ k_scale) {
  const long long piece = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  const long long row = piece / PIECES;
  if (row >= num_tokens) return;
  const int column = (int)(piece - row * PIECES) * COUNT;
  const PagedCache paged = {page_stride, row_stride,  block_size, num_blocks,
                            block_table, table_stride, columns};
  const Requests requests = {cu_seq_lens, request_count, seq_starts};
  const long long offset = row_offset(paged, requests, row);
  if (offset == ROW_NOT_OWNED) return;
  Reader::Piece codes = {};
  if (offset != ROW_NOT_FOUND) {
    codes = Reader::load(cache + offset, column, tensor_scale(k_scale));
  }
  store_each(reinterpret_cast<char*>(out) + row * out_stride, column, codes);
}
