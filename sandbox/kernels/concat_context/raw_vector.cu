// A block some heads of a token. A thread stays at its columns while it walks over the heads, so
// that nothing is divided, k_pe is read once, and keys are written head after head without a gap.
#include "overlap.cuh"
#include "vector.cuh"

constexpr int NOPES = NOPE_BYTES / VECTOR;
constexpr int ITEMS = NOPES + ROPE_BYTES / VECTOR;  // of a head
constexpr int LANES = ITEMS < THREADS ? ITEMS : THREADS;
constexpr int STEP = THREADS / LANES;  // heads that the block takes at a time

extern "C" __global__ void __launch_bounds__(THREADS)
    concat_vector(const char* k_nope, long long k_nope_token_stride, long long k_nope_head_stride,
                  const char* k_pe, long long k_pe_stride, char* k_out,
                  long long k_out_token_stride, long long k_out_head_stride, int heads_a_block) {
  wait_for_previous_kernel();
  const long long token = blockIdx.x;
  const int first_head = blockIdx.y * heads_a_block;
  const int heads = HEADS - first_head < heads_a_block ? HEADS - first_head : heads_a_block;
  k_nope += token * k_nope_token_stride + first_head * k_nope_head_stride;
  k_pe += token * k_pe_stride;
  k_out += token * k_out_token_stride + first_head * k_out_head_stride;
  if (threadIdx.x >= LANES * STEP) return;  // the rest would take heads a second time
#pragma unroll 1
  for (int item = threadIdx.x % LANES; item < ITEMS; item += LANES) {
    const bool shared = item >= NOPES;
    const char* from = shared ? k_pe + (item - NOPES) * VECTOR : k_nope + item * VECTOR;
    char* to = k_out + item * VECTOR;
    Vector<VECTOR> key;
    if (shared) key = load_once<VECTOR>(from);
#pragma unroll 1
    for (int first = threadIdx.x / LANES; first < heads; first += STEP * IN_FLIGHT) {
      Vector<VECTOR> values[IN_FLIGHT];
#pragma unroll
      for (int i = 0; i < IN_FLIGHT; ++i) {
        const int head = first + STEP * i;
        if (!shared && head < heads) {
          values[i] = load_once<VECTOR>(from + head * k_nope_head_stride);
        }
      }
#pragma unroll
      for (int i = 0; i < IN_FLIGHT; ++i) {
        const int head = first + STEP * i;
        if (head < heads) {
          store_once<VECTOR>(to + head * k_out_head_stride, shared ? key : values[i]);
        }
      }
    }
  }
}
