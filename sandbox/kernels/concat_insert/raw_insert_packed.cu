// A team of threads a token: all of a thread's loads, the slot's too, are under way at once, and
// what is left is to agree on scales by shuffles.
#include "cache_row.cuh"
#include "overlap.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    insert_packed(const char* __restrict__ kv_c, long long kv_c_stride,
                  const char* __restrict__ k_pe, long long k_pe_stride, char* __restrict__ cache,
                  long long page_stride, long long row_stride, int block_size, long long capacity,
                  const float* __restrict__ k_scale, const long long* __restrict__ slot_mapping,
                  long long tokens) {
  wait_for_previous_kernel();
  const int team = threadIdx.x / TEAM;
  const long long token = blockIdx.x * (long long)(THREADS / TEAM) + team;
  if (token >= tokens) return;
  const long long slot = __ldg(slot_mapping + token);
  const RopeTable unrotated = {};
  PackedRow<ELEMENT, FORMAT, POW2, LATENT, ROPE, VECTOR, CACHE_VECTOR, 4, TEAM> packed;
  packed.load(kv_c + token * kv_c_stride, k_pe + token * k_pe_stride, unrotated, 0, k_scale,
              threadIdx.x - team * TEAM);
  const PagedRows paged = {cache, page_stride, row_stride, block_size, capacity};
  char* row = row_of(paged, slot);
  if (row != nullptr) packed.store(row);
}
