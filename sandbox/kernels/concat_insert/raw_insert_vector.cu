// A block a tile of tokens as one flat run of vectors: all of a thread's loads are under way before
// the slots are known, and each row is found once, for all who write to it, in shared memory. A
// tile of one token needs neither the memory nor the barrier.
#include "cache_row.cuh"
#include "overlap.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    insert_vector(const char* __restrict__ kv_c, long long kv_c_stride,
                  const char* __restrict__ k_pe, long long k_pe_stride, char* __restrict__ cache,
                  long long page_stride, long long row_stride, int block_size, long long capacity,
                  const float* k_scale, const long long* __restrict__ slot_mapping,
                  long long tokens) {
  wait_for_previous_kernel();
  constexpr int LATENTS = KV_C_BYTES / VECTOR;
  constexpr int VECTORS = LATENTS + K_PE_BYTES / VECTOR;
  __shared__ char* rows[ROWS];
  const long long first_token = blockIdx.x * (long long)ROWS;
  const int here = tokens - first_token < ROWS ? (int)(tokens - first_token) : ROWS;
  const PagedRows paged = {cache, page_stride, row_stride, block_size, capacity};
  kv_c += first_token * kv_c_stride;
  k_pe += first_token * k_pe_stride;
  long long slot = -1;
  if (ROWS == 1 || threadIdx.x < here) {
    slot = __ldg(slot_mapping + first_token + (ROWS == 1 ? 0 : threadIdx.x));
  }
#pragma unroll 1
  for (int pass = 0; pass < ROWS * VECTORS; pass += THREADS * IN_FLIGHT) {
    Vector<VECTOR> values[IN_FLIGHT];
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      const int vector = pass + threadIdx.x + THREADS * i;
      if (vector < here * VECTORS) {
        const int row = vector / VECTORS;
        const int column = vector - row * VECTORS;
        const char* from = column < LATENTS
                               ? kv_c + row * kv_c_stride + column * VECTOR
                               : k_pe + row * k_pe_stride + (column - LATENTS) * VECTOR;
        values[i] = load_once<VECTOR>(from);
      }
    }
    if (ROWS > 1 && pass == 0) {
      if (threadIdx.x < ROWS) rows[threadIdx.x] = row_of(paged, slot);
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      const int vector = pass + threadIdx.x + THREADS * i;
      if (vector < here * VECTORS) {
        const int row = vector / VECTORS;
        char* to = ROWS == 1 ? row_of(paged, slot) : rows[row];
        if (to != nullptr) store_once<VECTOR>(to + (vector - row * VECTORS) * VECTOR, values[i]);
      }
    }
  }
}
