// One thread an element: every thread finds its token's row for itself.
#include "cache_row.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    insert_element(const ELEMENT* __restrict__ kv_c, long long kv_c_stride,
                   const ELEMENT* __restrict__ k_pe, long long k_pe_stride,
                   ELEMENT* __restrict__ cache, long long page_stride, long long row_stride,
                   int block_size, long long capacity, const long long* __restrict__ slot_mapping,
                   long long tokens) {
  const long long element = blockIdx.x * (long long)THREADS + threadIdx.x;
  const long long token = element / (LATENT + ROPE);
  if (token >= tokens) return;
  const int column = (int)(element - token * (LATENT + ROPE));
  const PagedRows rows = {reinterpret_cast<char*>(cache), page_stride, row_stride, block_size,
                          capacity};
  char* row = row_of(rows, slot_mapping[token]);
  if (row == nullptr) return;
  const char* from = column < LATENT ? reinterpret_cast<const char*>(kv_c) + token * kv_c_stride
                                     : reinterpret_cast<const char*>(k_pe) + token * k_pe_stride;
  reinterpret_cast<ELEMENT*>(row)[column] =
      reinterpret_cast<const ELEMENT*>(from)[column < LATENT ? column : column - LATENT];
}
