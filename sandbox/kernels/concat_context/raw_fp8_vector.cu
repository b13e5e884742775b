// A block some heads of a token, keys and values side by side, as they lie in the projection. A
// thread stays at its columns while it walks over the heads.
#include "fp8_heads.cuh"
#include "overlap.cuh"

constexpr int NOPES = NOPE / COUNT;
constexpr int KEYS = NOPES + ROPE / COUNT;
constexpr int ITEMS = KEYS + VALUE / COUNT;  // of a head, keys first
constexpr int BYTES = COUNT * int(sizeof(ELEMENT));  // of an item, before it is coded

extern "C" __global__ void __launch_bounds__(THREADS)
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
  walk_items<ITEMS, THREADS>(heads, [&](int item, const HeadWalk& walk) {
    HeadColumns columns;
    if (item < KEYS) {
      const bool shared = item >= NOPES;
      columns.from = shared ? k_pe + (item - NOPES) * BYTES : k_nope + item * BYTES;
      columns.from_stride = shared ? 0 : k_nope_head_stride;
      columns.to = k_out + item * COUNT;
      columns.to_stride = k_out_head_stride;
      columns.descale = k_descale;
    } else {
      columns.from = v + (item - KEYS) * BYTES;
      columns.from_stride = v_head_stride;
      columns.to = v_out + (item - KEYS) * COUNT;
      columns.to_stride = v_out_head_stride;
      columns.descale = v_descale;
    }
    quantise_heads<ELEMENT, COUNT, IN_FLIGHT>(columns, walk, AsTheyAre());
  });
}
