// A block some heads of a token, keys and values side by side, as they lie in the projection. A
// thread stays at its columns while it walks over the heads; the first of them store k_pe too.
#include "fp8_heads.cuh"
#include "overlap.cuh"
#include "residency.cuh"

constexpr int BYTES = COUNT * int(sizeof(ELEMENT));  // of an item, before it is coded
constexpr int NOPES = NOPE / COUNT;                  // items of a head
constexpr int ROPES = ROPE / COUNT;
constexpr int LOADED = NOPES + VALUE / COUNT;
constexpr int ITEMS = LOADED > ROPES ? LOADED : ROPES;

extern "C" __global__ void __launch_bounds__(THREADS, resident_blocks(BLOCKS_PER_SM))
    concat_fp8_vector(const char* k_nope, long long k_nope_token_stride,
                      long long k_nope_head_stride, const char* k_pe, long long k_pe_stride,
                      const char* v, long long v_token_stride, long long v_head_stride,
                      const float* k_descale, const float* v_descale, char* k_out,
                      long long k_out_token_stride, long long k_out_head_stride, char* v_out,
                      long long v_out_token_stride, long long v_out_head_stride,
                      int heads_a_block) {
  wait_for_previous_kernel();
  const long long token = blockIdx.x;
  const int first_head = blockIdx.y * heads_a_block;
  const int heads = HEADS - first_head < heads_a_block ? HEADS - first_head : heads_a_block;
  k_nope += token * k_nope_token_stride + first_head * k_nope_head_stride;
  k_pe += token * k_pe_stride;
  v += token * v_token_stride + first_head * v_head_stride;
  k_out += token * k_out_token_stride + first_head * k_out_head_stride;
  v_out += token * v_out_token_stride + first_head * v_out_head_stride;
  walk_items<ITEMS, 0, THREADS>(heads, [&](int item, const HeadWalk& walk) {
    const int other = item - NOPES;
    const HeadColumns columns =
        other < 0 ? HeadColumns{k_nope + item * BYTES, k_nope_head_stride, k_out + item * COUNT,
                                k_out_head_stride, k_descale}
                  : HeadColumns{v + other * BYTES, v_head_stride, v_out + other * COUNT,
                                v_out_head_stride, v_descale};
    const HeadColumns rope = {k_pe + item * BYTES, 0, k_out + NOPE + item * COUNT,
                              k_out_head_stride, k_descale};
    const auto shared =
        SharedCodes<COUNT>::of<ELEMENT>(rope, walk, item < ROPES, Plainly());
    quantize_heads<ELEMENT, COUNT, IN_FLIGHT>(columns, walk, shared,
                                              ITEMS == LOADED || item < LOADED);
  });
}
