// One thread an element or a pair of any of a token's 3 * HEADS + 1 output rows, or all values of
// the cache row that share a scale.
#include "element_row.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    prefill_fp8_element(const ELEMENT* q, long long q_token_stride, long long q_head_stride,
                        const ELEMENT* k_nope, long long k_nope_token_stride,
                        long long k_nope_head_stride, const ELEMENT* v, long long v_token_stride,
                        long long v_head_stride, const ELEMENT* kv_c, long long kv_c_stride,
                        const ELEMENT* k_pe, long long k_pe_stride, char* cache,
                        long long page_stride, long long row_stride, int block_size,
                        long long capacity, const float* k_scale, const long long* slot_mapping,
                        const long long* positions, const float* cos_sin, long long table_stride,
                        long long table_rows, const float* q_descale, const float* k_descale,
                        const float* v_descale, unsigned char* q_out, long long q_out_token_stride,
                        long long q_out_head_stride, unsigned char* k_out,
                        long long k_out_token_stride, long long k_out_head_stride,
                        unsigned char* v_out, long long v_out_token_stride,
                        long long v_out_head_stride, long long tokens) {
  constexpr int PAIRS = ROPE / 2;
  constexpr int KEY_ITEMS = NOPE + PAIRS;
  constexpr int HEAD_ITEMS = 2 * KEY_ITEMS + VALUE;
  constexpr int ITEMS = HEADS * HEAD_ITEMS + LATENT + PAIRS;
  const long long index = blockIdx.x * (long long)THREADS + threadIdx.x;
  const long long token = index / ITEMS;
  if (token >= tokens) return;
  int item = (int)(index - token * ITEMS);
  const int head = item < HEADS * HEAD_ITEMS ? item / HEAD_ITEMS : HEADS;
  item -= head * HEAD_ITEMS;
  const ELEMENT* rope_key = at(k_pe, token * k_pe_stride);
  const RopeTable table = {cos_sin, table_stride, table_rows};
  const long long position = cos_sin == nullptr ? 0 : positions[token];
  if (head == HEADS) {
    const PagedRows paged = {cache, page_stride, row_stride, block_size, capacity};
    char* row = row_of(paged, slot_mapping[token]);
    if (row == nullptr) return;
    insert_item<ELEMENT, FORMAT, POW2, LATENT, ROPE>(item, at(kv_c, token * kv_c_stride), rope_key,
                                                     table, position, row, k_scale);
  } else if (item < KEY_ITEMS) {
    const ELEMENT* from = at(q, token * q_token_stride + head * q_head_stride);
    const ElementRow<ELEMENT> query = {from, from + NOPE, NOPE};
    query.write_codes(at(q_out, token * q_out_token_stride + head * q_out_head_stride), item,
                      table, position, PAIRS, HeadCode(q_descale));
  } else if (item < 2 * KEY_ITEMS) {
    const ElementRow<ELEMENT> key = {
        at(k_nope, token * k_nope_token_stride + head * k_nope_head_stride), rope_key, NOPE};
    key.write_codes(at(k_out, token * k_out_token_stride + head * k_out_head_stride),
                    item - KEY_ITEMS, table, position, PAIRS, HeadCode(k_descale));
  } else {
    const ElementRow<ELEMENT> value = {at(v, token * v_token_stride + head * v_head_stride),
                                       nullptr, VALUE};
    value.write_codes(at(v_out, token * v_out_token_stride + head * v_out_head_stride),
                      item - 2 * KEY_ITEMS, table, position, PAIRS, HeadCode(v_descale));
  }
}
