// One thread an element or a pair of any of a token's HEADS + 1 output rows, or all values of the
// cache row that share a scale.
#include "element_row.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    decode_element(const ELEMENT* __restrict__ ql_nope, long long ql_nope_token_stride,
                   long long ql_nope_head_stride, const ELEMENT* __restrict__ q_pe,
                   long long q_pe_token_stride, long long q_pe_head_stride,
                   const ELEMENT* __restrict__ kv_c, long long kv_c_stride,
                   const ELEMENT* __restrict__ k_pe, long long k_pe_stride,
                   char* __restrict__ cache, long long page_stride, long long row_stride,
                   int block_size, long long capacity, const float* __restrict__ k_scale,
                   const long long* __restrict__ slot_mapping,
                   const long long* __restrict__ positions, const float* __restrict__ cos_sin,
                   long long table_stride, long long table_rows, void* __restrict__ q_out,
                   long long q_out_token_stride, long long q_out_head_stride,
                   const float* __restrict__ q_descale, long long tokens) {
  constexpr int PAIRS = ROPE / 2;
  constexpr int ITEMS = LATENT + PAIRS;
  const long long index = blockIdx.x * (long long)THREADS + threadIdx.x;
  const long long token = index / (ITEMS * (HEADS + 1));
  if (token >= tokens) return;
  const int rest = (int)(index - token * (ITEMS * (HEADS + 1)));
  const int head = rest / ITEMS;
  const int item = rest - head * ITEMS;
  const RopeTable table = {cos_sin, table_stride, table_rows};
  const long long position = cos_sin == nullptr ? 0 : positions[token];
  if (head < HEADS) {
    const ElementRow<ELEMENT> source = {
        at(ql_nope, token * ql_nope_token_stride + head * ql_nope_head_stride),
        at(q_pe, token * q_pe_token_stride + head * q_pe_head_stride), LATENT};
    char* to = static_cast<char*>(q_out) + token * q_out_token_stride + head * q_out_head_stride;
    if constexpr (FP8_QUERY) {
      source.write_codes(reinterpret_cast<unsigned char*>(to), item, table, position, PAIRS,
                         HeadCode(q_descale));
    } else {
      source.write(reinterpret_cast<ELEMENT*>(to), item, table, position, PAIRS);
    }
  } else {
    const PagedRows paged = {cache, page_stride, row_stride, block_size, capacity};
    char* row = row_of(paged, slot_mapping[token]);
    if (row == nullptr) return;
    insert_item<ELEMENT, FORMAT, POW2, LATENT, ROPE>(item, at(kv_c, token * kv_c_stride),
                                                     at(k_pe, token * k_pe_stride), table,
                                                     position, row, k_scale);
  }
}
