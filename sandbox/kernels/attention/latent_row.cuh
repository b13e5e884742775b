// Queries and rows of the cache in a warp; the macros FORMAT, ELEMENT, LATENT, ROPE and QUERY say
// what they are.
#pragma once
#include "cache_read.cuh"
#include "numbers.cuh"
#include "warp_row.cuh"

// Values of a byte of codes.
constexpr int COUNT = FORMAT == INT4_PER_TOKEN ? 2 : 1;

using Row = WarpRow<LATENT + ROPE, COUNT>;

__device__ __forceinline__ Row query_row(const QUERY* query) {
  Row row;
  row.each([&](int column, float(&to)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) to[i] = number(query[column + i]);
  });
  return row;
}

// `k_scale` is the descale of formats that have one for all rows.
__device__ __forceinline__ Row key_row(const char* bytes, float k_scale) {
  using Reader = RowReader<FORMAT, LATENT, ROPE, COUNT>;
  Row row;
  row.each([&](int column, float(&to)[COUNT]) {
    if constexpr (FORMAT == PLAIN) {
      to[0] = number(reinterpret_cast<const ELEMENT*>(bytes)[column]);
    } else {
      Reader::restore(Reader::load(bytes, column, k_scale), column, to);
    }
  });
  return row;
}
