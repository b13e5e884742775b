// Blocks of keys and values, side by side as they lie in the projection, then blocks of queries,
// each a token or, where tokens are few, some heads of one. A thread stays at its columns while it
// walks over the heads, so that nothing is divided, position, angles and k_pe are read once, and
// codes are written head after head without a gap. Loads are under way before angles and descales
// are known.
#include "cache_row.cuh"
#include "fp8_heads.cuh"
#include "overlap.cuh"
#include "residency.cuh"

constexpr int BYTES = COUNT * int(sizeof(ELEMENT));  // of an item, before it is coded
constexpr int PAIRS = COUNT > 1 ? COUNT / 2 : 1;
constexpr int NOPES = NOPE / COUNT;  // items of a head
constexpr int ROPES = ROPE / COUNT;
constexpr int LOADED = NOPES + VALUE / COUNT;  // of keys and values; the first store k_pe too
constexpr int ITEMS = LOADED > ROPES ? LOADED : ROPES;

// One token's heads of an input and of the codes made of it.
struct Heads {
  const char* from;
  long long from_stride;
  char* to;
  long long to_stride;
  const float* descale;

  __device__ __forceinline__ HeadColumns item(int number) const {
    return {from + number * BYTES, from_stride, to + number * COUNT, to_stride, descale};
  }
};

__device__ __forceinline__ Heads heads_at(const void* from, long long from_token_stride,
                                          long long from_stride, void* to,
                                          long long to_token_stride, long long to_stride,
                                          const float* descale, long long token, int first) {
  return {static_cast<const char*>(from) + token * from_token_stride + first * from_stride,
          from_stride, static_cast<char*>(to) + token * to_token_stride + first * to_stride,
          to_stride, descale};
}

struct Rotation : Plainly {
  const RopeTable& table;
  const long long* position;
  const int piece;  // of the rotated columns; negative: others, which are not rotated
  Angles<PAIRS> angles;

  __device__ __forceinline__ Rotation(const RopeTable& table, const long long* position, int piece)
      : table(table), position(position), piece(piece) {}

  __device__ __forceinline__ bool turns() const { return piece >= 0 && table.rows != nullptr; }

  __device__ __forceinline__ void prepare() {
    if (!turns()) return;
    angles = angles_at<PAIRS, TABLE_VECTOR>(table, __ldg(position), ROPE / 2, piece * PAIRS);
  }

  __device__ __forceinline__ void change(float (&values)[COUNT]) const {
    if constexpr (COUNT > 1) {
      if (!turns()) return;
#pragma unroll
      for (int i = 0; i < PAIRS; ++i) {
        rotate_pair(values[2 * i], values[2 * i + 1], angles.cosine[i], angles.sine[i]);
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, resident_blocks(BLOCKS_PER_SM))
    prefill_fp8_fused(const ELEMENT* q, long long q_token_stride, long long q_head_stride,
                      const ELEMENT* k_nope, long long k_nope_token_stride,
                      long long k_nope_head_stride, const ELEMENT* v, long long v_token_stride,
                      long long v_head_stride, const char* kv_c, long long kv_c_stride,
                      const char* k_pe, long long k_pe_stride, char* cache, long long page_stride,
                      long long row_stride, int block_size, long long capacity,
                      const float* k_scale, const long long* slot_mapping,
                      const long long* positions, const float* cos_sin, long long table_stride,
                      long long table_rows, const float* q_descale, const float* k_descale,
                      const float* v_descale, char* q_out, long long q_out_token_stride,
                      long long q_out_head_stride, char* k_out, long long k_out_token_stride,
                      long long k_out_head_stride, char* v_out, long long v_out_token_stride,
                      long long v_out_head_stride, int heads_a_block) {
  wait_for_previous_kernel();
  const int tokens = gridDim.x / 2;
  const bool queries = blockIdx.x >= tokens;
  const long long token = queries ? blockIdx.x - tokens : blockIdx.x;
  const int first = blockIdx.y * heads_a_block;
  const int heads = HEADS - first < heads_a_block ? HEADS - first : heads_a_block;
  const RopeTable table = {cos_sin, table_stride, table_rows};
  const long long* position = positions + token;
  if (queries) {
    const Heads query = heads_at(q, q_token_stride, q_head_stride, q_out, q_out_token_stride,
                                 q_out_head_stride, q_descale, token, first);
    walk_items<NOPES, ROPES, THREADS>(heads, [&](int item, const HeadWalk& walk) {
      quantize_heads<ELEMENT, COUNT, IN_FLIGHT>(query.item(item), walk,
                                                Rotation(table, position, item - NOPES));
    });
    return;
  }

  k_pe += token * k_pe_stride;
  if (blockIdx.y == 0) {
    const PagedRows paged = {cache, page_stride, row_stride, block_size, capacity};
    insert_row<ELEMENT, FORMAT, POW2, LATENT, ROPE, VECTOR, CACHE_VECTOR, TABLE_VECTOR, THREADS>(
        kv_c + token * kv_c_stride, k_pe, table, positions == nullptr ? 0 : __ldg(position),
        row_of(paged, __ldg(slot_mapping + token)), k_scale);
  }
  const Heads key = heads_at(k_nope, k_nope_token_stride, k_nope_head_stride, k_out,
                             k_out_token_stride, k_out_head_stride, k_descale, token, first);
  const Heads value = heads_at(v, v_token_stride, v_head_stride, v_out, v_out_token_stride,
                               v_out_head_stride, v_descale, token, first);
  walk_items<ITEMS, 0, THREADS>(heads, [&](int item, const HeadWalk& walk) {
    const HeadColumns rope = {k_pe + item * BYTES, 0, key.to + NOPE + item * COUNT,
                              key.to_stride, k_descale};
    const auto shared = SharedCodes<COUNT>::of<ELEMENT>(rope, walk, item < ROPES,
                                                        Rotation(table, position, item));
    quantize_heads<ELEMENT, COUNT, IN_FLIGHT>(
        item < NOPES ? key.item(item) : value.item(item - NOPES), walk, shared,
        ITEMS == LOADED || item < LOADED);
  });
}
