// Which queries and keys a block works on: a tile of the queries of one request.
#pragma once
#include "prefill_block.cuh"

// A block's queries of one head, and the keys that they see: query i of the block the first
// `first_seen + i * CAUSAL` of `keys`.
struct Work {
  long long first_query, first_key;
  int head, queries, keys, first_seen;

  __device__ __forceinline__ int seen(int row) const {
    return min(CAUSAL ? first_seen + row : first_seen, keys);
  }
};

static_assert(sizeof(Work) == WORK_BYTES, "as it lies in shared memory");

// The request of a tile of queries. Request r has tiles from first_row(r) / BLOCK_Q + r on, at
// least as many as it needs; the rows that no request owns are those of one more, without keys.
struct Requests {
  const int* cu_seqlens_q;
  const int* cu_seqlens_k;
  int count, tiles;
  long long q_rows, k_rows;

  __device__ __forceinline__ long long first_row(int request) const {
    if (request > count) return q_rows;
    return min(max((long long)__ldg(cu_seqlens_q + request), 0LL), q_rows);
  }

  __device__ __forceinline__ int first_tile(int request) const {
    return request > count ? tiles : int(first_row(request) / BLOCK_Q) + request;
  }

  // All lanes of a warp together: each looks at one of 32 requests, which narrows the range.
  __device__ __forceinline__ int of_tile(int tile) const {
    int first = 0, end = count + 1;
    while (end - first > 1) {
      const int step = (end - first + 31) / 32;
      const int request = first + int(threadIdx.x % 32) * step;
      const unsigned int starts =
          __ballot_sync(0xffffffffu, request < end && first_tile(request) <= tile);
      first += max(__popc(starts) - 1, 0) * step;
      end = min(first + step, end);
    }
    return first;
  }

  // Tiles that see most keys come first.
  __device__ __forceinline__ Work work(int tile) const {
    const int request = of_tile(tile);
    const long long first = first_row(request), rows = first_row(request + 1) - first;
    const long long row = (long long)(first_tile(request + 1) - 1 - tile) * BLOCK_Q;
    Work work;
    work.first_query = first + row;
    work.queries = int(min(max(rows - row, 0LL), (long long)BLOCK_Q));
    work.first_key = work.keys = work.first_seen = 0;
    if (request < count && work.queries > 0) {
      const long long end = min((long long)__ldg(cu_seqlens_k + request + 1), k_rows);
      work.first_key = max((long long)__ldg(cu_seqlens_k + request), 0LL);
      const int keys = int(max(end - work.first_key, 0LL));
      work.keys = keys;
      work.first_seen = keys;
      if (CAUSAL) {
        const long long seen = keys - rows + row + 1;
        work.first_seen = int(max(seen, -(long long)BLOCK_Q));
        work.keys = int(min(max(seen + work.queries - 1, 0LL), (long long)keys));
      }
    }
    return work;
  }
};
