// One thread an element: every thread looks its row up for itself.
#include "paged.cuh"
#include "vector.cuh"

using Element = Vector<ELEMENT_BYTES>;

extern "C" __global__ void gather_element(const void* __restrict__ cache, long long page_stride,
                                          long long row_stride, int block_size, int num_blocks,
                                          const int* __restrict__ block_table,
                                          long long table_stride, int columns,
                                          const int* __restrict__ cu_seq_lens, int request_count,
                                          const int* __restrict__ seq_starts,
                                          void* __restrict__ out, long long out_stride,
                                          long long num_tokens) {
  const long long element = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  const long long row = element / ROW;
  if (row >= num_tokens) return;
  const int column = (int)(element - row * ROW);
  const PagedCache paged = {page_stride, row_stride,  block_size, num_blocks,
                            block_table, table_stride, columns};
  const Requests requests = {cu_seq_lens, request_count, seq_starts};
  const long long offset = row_offset(paged, requests, row);
  if (offset == ROW_NOT_OWNED) return;
  const char* source = static_cast<const char*>(cache) + offset;
  Element* target = reinterpret_cast<Element*>(static_cast<char*>(out) + row * out_stride);
  target[column] =
      offset == ROW_NOT_FOUND ? Element(0) : reinterpret_cast<const Element*>(source)[column];
}
