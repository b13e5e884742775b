// One thread an element, or all values that share a scale: every thread finds its token's row for
// itself.
#include "element_row.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    insert_element(const ELEMENT* __restrict__ kv_c, long long kv_c_stride,
                   const ELEMENT* __restrict__ k_pe, long long k_pe_stride,
                   char* __restrict__ cache, long long page_stride, long long row_stride,
                   int block_size, long long capacity, const float* __restrict__ k_scale,
                   const long long* __restrict__ slot_mapping, long long tokens) {
  constexpr int ITEMS = LATENT + ROPE / 2;
  const long long index = blockIdx.x * (long long)THREADS + threadIdx.x;
  const long long token = index / ITEMS;
  if (token >= tokens) return;
  const PagedRows rows = {cache, page_stride, row_stride, block_size, capacity};
  char* row = row_of(rows, slot_mapping[token]);
  if (row == nullptr) return;
  const RopeTable unrotated = {};
  insert_item<ELEMENT, FORMAT, POW2, LATENT, ROPE>(
      (int)(index - token * ITEMS), at(kv_c, token * kv_c_stride), at(k_pe, token * k_pe_stride),
      unrotated, 0, row, k_scale);
}
