// Queries and tiles of keys and values from global to shared memory, ahead of their use.
#pragma once
#include "prefill_block.cuh"

// Keeps tiles of keys and values coming. `keys`, `ahead` and `values` are called by turns with the
// number of keys left. When `keys` or `values` returns, its first tile of these is there for all.
struct Feed {
  char* shared;
  const char* next_keys;
  const char* next_values;
  long long key_stride, value_stride;

  static __device__ __forceinline__ int stage(int left) { return (left - 1) / BLOCK_K % 2; }
  __device__ __forceinline__ char* key_tile(int left) const {
    return shared + KEYS_AT + (K_STAGES == 2 ? stage(left) * KeyTile::BYTES : 0);
  }
  __device__ __forceinline__ char* value_tile(int left) const {
    return shared + VALUES_AT + (V_STAGES == 2 ? stage(left) * ValueTile::BYTES : 0);
  }

  __device__ __forceinline__ void begin_keys(int left) {
    if (left > 0) {
      KeyCopy::begin(key_tile(left), shared + WAITING_KEYS_AT, next_keys, key_stride, left);
      next_keys += BLOCK_K * key_stride;
    }
  }
  __device__ __forceinline__ void begin_values(int left) {
    if (left > 0) {
      ValueCopy::begin(value_tile(left), shared + WAITING_VALUES_AT, next_values, value_stride,
                       left);
      next_values += BLOCK_K * value_stride;
    }
  }

  __device__ __forceinline__ void start(const char* queries, long long stride, int rows, int left) {
    if constexpr (CODES) {
      begin_keys(left);
      cp_async_commit();
      begin_values(left);
      cp_async_commit();
      QueryCopy::at_once(shared, queries, stride, rows);
    } else {
      QueryCopy::begin(shared, nullptr, queries, stride, rows);
      begin_keys(left);
      if (V_STAGES == 2) begin_values(left);
      cp_async_commit();
    }
  }

  __device__ __forceinline__ void keys(int left) {
    if constexpr (CODES) {  // they wait where no other thread looks, so the next may come at once
      cp_async_wait<1>();
      KeyCopy::finish(key_tile(left), shared + WAITING_KEYS_AT);
      begin_keys(left - BLOCK_K);
      cp_async_commit();
      __syncthreads();
    } else {
      cp_async_wait<0>();
      __syncthreads();
      if (V_STAGES == 1) {
        begin_values(left);
        cp_async_commit();
      }
    }
  }

  // What has room for a tile more. After the scores, whose products it would stand in the way of.
  __device__ __forceinline__ void ahead(int left) {
    if (CODES) return;
    if (K_STAGES == 2) begin_keys(left - BLOCK_K);
    if (V_STAGES == 2) begin_values(left - BLOCK_K);
    if (K_STAGES == 2 || V_STAGES == 2) cp_async_commit();
  }

  __device__ __forceinline__ void values(int left) {
    if constexpr (CODES) {
      cp_async_wait<1>();
      ValueCopy::finish(value_tile(left), shared + WAITING_VALUES_AT);
      begin_values(left - BLOCK_K);
      cp_async_commit();
      __syncthreads();
    } else if constexpr (K_STAGES == 1 || V_STAGES == 1) {
      if (V_STAGES == 1) cp_async_wait<K_STAGES - 1>();
      __syncthreads();
      if (K_STAGES == 1) {
        begin_keys(left - BLOCK_K);
        cp_async_commit();
      }
    }
  }
};
