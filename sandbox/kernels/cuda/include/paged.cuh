// Where a token's row stands in a paged cache.
#pragma once

constexpr long long ROW_NOT_OWNED = -1;  // no request has this row: leave it as it is
constexpr long long ROW_NOT_FOUND = -2;  // its page does not exist: a row of zeros

struct PagedCache {
  long long page_stride;  // bytes
  long long row_stride;   // bytes
  int block_size;
  int num_blocks;
  const int* block_table;
  long long table_stride;  // elements
  int columns;
};

// The requests whose rows stand one after the other in a workspace.
struct Requests {
  const int* bounds;  // cu_seq_lens, count + 1 entries
  int count;
  const int* starts;  // seq_starts, or null
};

// Last request b >= first with bounds[b] <= row, or first - 1.
__device__ __forceinline__ int owner_of(long long row, const Requests& requests, int first = 0) {
  int low = first, high = requests.count + 1;
  while (low < high) {
    const int middle = (low + high) >> 1;
    if (requests.bounds[middle] <= row) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low - 1;
}

// The same, found by all 32 lanes of a warp together: two dependent loads for 1,000 requests
// instead of ten.
__device__ __forceinline__ int owner_by_warp(long long row, const Requests& requests) {
  const int lane = threadIdx.x & 31;
  int low = 0, unknown = requests.count + 1;
  while (unknown > 0) {
    const int step = (unknown + 31) / 32;
    const int probe = low + min((lane + 1) * step, unknown) - 1;
    const int passed = __popc(__ballot_sync(0xffffffffu, requests.bounds[probe] <= row));
    const int known = min(passed * step, unknown);
    low += known;
    unknown = min(step, unknown - known) - (passed < 32);
  }
  return low - 1;
}

// Byte offset in the cache of the row of `request` that belongs at `row` of the workspace, or one
// of the negative constants above.
__device__ __forceinline__ long long row_offset(const PagedCache& cache, const Requests& requests,
                                                int request, long long row) {
  if (request < 0 || request >= requests.count) return ROW_NOT_OWNED;
  long long position = row - requests.bounds[request];
  if (requests.starts != nullptr) position += requests.starts[request];
  if (position < 0) return ROW_NOT_FOUND;
  const long long column = position >> 31 ? position / cache.block_size
                                          : (unsigned int)position / (unsigned int)cache.block_size;
  if (column >= cache.columns) return ROW_NOT_FOUND;
  const int block = cache.block_table[request * cache.table_stride + column];
  if (block < 0 || block >= cache.num_blocks) return ROW_NOT_FOUND;
  return block * cache.page_stride + (position - column * cache.block_size) * cache.row_stride;
}

__device__ __forceinline__ long long row_offset(const PagedCache& cache, const Requests& requests,
                                                long long row) {
  return row_offset(cache, requests, owner_of(row, requests), row);
}

// Offsets of consecutive rows, one a lane; the rows of a warp mostly belong to one request.
__device__ __forceinline__ long long row_offset_by_warp(const PagedCache& cache,
                                                        const Requests& requests,
                                                        long long first_row, long long rows) {
  int request = owner_by_warp(first_row, requests);
  const int lane = threadIdx.x & 31;
  if (lane >= rows) return ROW_NOT_OWNED;
  const long long row = first_row + lane;
  if (request < requests.count && requests.bounds[request + 1] <= row) {
    request = owner_of(row, requests, request + 1);
  }
  return row_offset(cache, requests, request, row);
}
