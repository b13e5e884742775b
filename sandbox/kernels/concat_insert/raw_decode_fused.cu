// A block a few heads of one token as one flat run of vectors, all loads under way before the
// angles are known; one more block a token writes the cache row.
#include "cache_row.cuh"
#include "overlap.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    decode_fused(const ELEMENT* __restrict__ ql_nope, long long ql_nope_token_stride,
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
                 const float* __restrict__ q_descale) {
  wait_for_previous_kernel();
  constexpr int SIZE = int(sizeof(ELEMENT));
  constexpr int PIECE = piece_bytes(VECTOR, SIZE);
  constexpr int PAIRS = PIECE / SIZE / 2;
  constexpr int LATENTS = LATENT * SIZE / VECTOR;
  constexpr int ITEMS = LATENTS + ROPE * SIZE / PIECE;
  const long long token = blockIdx.x;
  const long long position = positions == nullptr ? 0 : __ldg(positions + token);
  const RopeTable table = {cos_sin, table_stride, table_rows};
  if (blockIdx.y == 0) {
    const PagedRows paged = {cache, page_stride, row_stride, block_size, capacity};
    insert_row<ELEMENT, FORMAT, POW2, LATENT, ROPE, VECTOR, CACHE_VECTOR, TABLE_VECTOR, THREADS>(
        reinterpret_cast<const char*>(kv_c) + token * kv_c_stride,
        reinterpret_cast<const char*>(k_pe) + token * k_pe_stride, table, position,
        row_of(paged, __ldg(slot_mapping + token)), k_scale);
    return;
  }
  const int first_head = (blockIdx.y - 1) * HEADS_A_BLOCK;
  const int heads = HEADS - first_head < HEADS_A_BLOCK ? HEADS - first_head : HEADS_A_BLOCK;
  const char* latents = reinterpret_cast<const char*>(ql_nope) + token * ql_nope_token_stride +
                        first_head * ql_nope_head_stride;
  const char* ropes = reinterpret_cast<const char*>(q_pe) + token * q_pe_token_stride +
                      first_head * q_pe_head_stride;
  char* to = static_cast<char*>(q_out) + token * q_out_token_stride +
             first_head * q_out_head_stride;
#pragma unroll 1
  for (int first = threadIdx.x; first < heads * ITEMS; first += THREADS * IN_FLIGHT) {
    Vector<PIECE> values[IN_FLIGHT];
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      const int item = first + THREADS * i;
      if (item < heads * ITEMS) {
        const int head = item / ITEMS;
        const int column = item - head * ITEMS;
        if (column < LATENTS) {
          const auto part =
              load_once<VECTOR>(latents + head * ql_nope_head_stride + column * VECTOR);
          memcpy(values + i, &part, VECTOR);
        } else {
          values[i] = load_piece<PIECE, VECTOR>(ropes + head * q_pe_head_stride +
                                                (column - LATENTS) * PIECE);
        }
      }
    }
    const float factor = FP8_QUERY ? 1.0f / __ldg(q_descale) : 1.0f;
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      const int item = first + THREADS * i;
      if (item < heads * ITEMS) {
        const int head = item / ITEMS;
        const int column = item - head * ITEMS;
        char* row = to + head * q_out_head_stride;
        if (column < LATENTS) {
          Vector<VECTOR> part;
          memcpy(&part, values + i, VECTOR);
          if constexpr (FP8_QUERY) {
            float numbers[VECTOR / SIZE];
            unpack<ELEMENT, VECTOR>(part, numbers);
            store_by<QUERY_VECTOR>(row + column * (VECTOR / SIZE), head_codes(numbers, factor));
          } else {
            store_once<VECTOR>(row + column * VECTOR, part);
          }
        } else {
          const int piece = column - LATENTS;
          float numbers[2 * PAIRS];
          unpack<ELEMENT, PIECE>(values[i], numbers);
          if (cos_sin != nullptr) {
            rotate_pairs(numbers, angles_at<PAIRS, TABLE_VECTOR>(table, position, ROPE / 2,
                                                                 piece * PAIRS));
          }
          if constexpr (FP8_QUERY) {
            store_by<QUERY_VECTOR>(row + LATENT + piece * (2 * PAIRS),
                                   head_codes(numbers, factor));
          } else {
            const auto turned = cos_sin == nullptr ? values[i] : pack<ELEMENT, PIECE>(numbers);
            store_piece<PIECE, VECTOR>(row + LATENT * SIZE + piece * PIECE, turned);
          }
        }
      }
    }
  }
}
