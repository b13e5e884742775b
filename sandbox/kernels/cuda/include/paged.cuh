// Where a token's row stands in a paged cache.
#pragma once

constexpr long long ROW_NOT_OWNED = -1;  // no request has this row: leave it as it is
constexpr long long ROW_NOT_FOUND = -2;  // its page does not exist: a row of zeros

// Last request b with bounds[b] <= row, or -1; bounds has requests + 1 entries.
__device__ __forceinline__ int owner_of(long long row, const int* bounds, int requests) {
  int low = 0, high = requests + 1;
  while (low < high) {
    const int middle = (low + high) >> 1;
    if (bounds[middle] <= row) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low - 1;
}

struct PagedCache {
  long long page_stride;  // bytes
  long long row_stride;   // bytes
  int block_size;
  int num_blocks;
  const int* block_table;
  long long table_stride;  // elements
  int columns;
};

// Byte offset in the cache of the row that belongs at `row` of the workspace, or one of the
// negative constants above.
__device__ __forceinline__ long long row_offset(const PagedCache& cache, long long row,
                                                const int* cu_seq_lens, int requests,
                                                const int* seq_starts) {
  const int request = owner_of(row, cu_seq_lens, requests);
  if (request < 0 || request >= requests) return ROW_NOT_OWNED;
  long long position = row - cu_seq_lens[request];
  if (seq_starts != nullptr) position += seq_starts[request];
  if (position < 0) return ROW_NOT_FOUND;
  const long long column = position / cache.block_size;
  if (column >= cache.columns) return ROW_NOT_FOUND;
  const int block = cache.block_table[request * cache.table_stride + column];
  if (block < 0 || block >= cache.num_blocks) return ROW_NOT_FOUND;
  return block * cache.page_stride + (position - column * cache.block_size) * cache.row_stride;
}
