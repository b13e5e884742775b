// Which keys each query of a request sees, and where their rows lie in the paged cache.
//
// A key has a place: its position in the request or, where each query names its keys, the entry of
// `indices` that does.
#pragma once

constexpr long long NO_ROW = -1;

// Packed by launch.py.
struct KeyLayout {
  long long page_stride, row_stride;            // of the cache, bytes
  long long table_stride;                       // of all others elements
  long long tree_request, tree_query;           // of tree_mask
  long long indices_request, indices_query;
  int block_size, num_blocks, columns;
  int tokens;  // queries of a request
  int window;  // the largest int where there is none
  int causal;  // 0 with a tree
  int chosen;  // entries of indices for each query
  int sparse;  // 1 where each query names its keys
};

// `indices`, or a table and lengths, of which a tree may be part; the others are null.
struct Keys {
  const int* block_table;
  const int* seq_lens;
  const int* tree_mask;
  const int* indices;
  const KeyLayout& layout;
};

// Places first <= place < end; never less than none.
struct Span {
  int first, end;
};

// Whether a block id, or a slot, means a row of the cache. The layout's block size is passed for those
// who know it when they compile.
__device__ __forceinline__ bool is_row(const KeyLayout& layout, int id, int block_size,
                                       bool is_slot) {
  return id >= 0 && (is_slot ? id / block_size : id) < layout.num_blocks;
}

// Byte offset in the cache of the row that it means at a place, or NO_ROW.
__device__ __forceinline__ long long row_offset_of(const KeyLayout& layout, int id, int place,
                                                   int block_size, bool is_slot) {
  if (!is_row(layout, id, block_size, is_slot)) return NO_ROW;
  const long long block = is_slot ? id / block_size : id;
  return block * layout.page_stride + (is_slot ? id : place) % block_size * layout.row_stride;
}

struct RequestKeys {
  const KeyLayout& layout;
  const int* table = nullptr;    // block ids
  const int* tree = nullptr;     // words of its first query, or null
  const int* indices = nullptr;  // of its first query, or null
  int length = 0;                // new tokens included
  int positions = 0;             // of these, those that the table has room for

  __device__ __forceinline__ RequestKeys(const Keys& keys, int request) : layout(keys.layout) {
    if (keys.layout.sparse) {
      indices = keys.indices + request * layout.indices_request;
      return;
    }
    table = keys.block_table + request * layout.table_stride;
    if (keys.tree_mask != nullptr) tree = keys.tree_mask + request * layout.tree_request;
    length = max(keys.seq_lens[request], 0);
    positions = int(min((long long)length, (long long)layout.columns * layout.block_size));
  }

  // Position of a query, negative where the request is shorter than its queries are many.
  __device__ __forceinline__ int own(int query) const { return length - layout.tokens + query; }

  // Places of the keys that a query sees; of some in it a tree says otherwise.
  __device__ __forceinline__ Span span(int query) const {
    if (layout.sparse) return {0, layout.chosen};
    const int position = own(query);
    const int first = position >= layout.window ? position - layout.window + 1 : 0;
    const int end = layout.causal ? min(position + 1, positions) : positions;
    return {first, max(first, end)};
  }

  // Places of the keys that any query sees, a later query never an earlier first or end.
  __device__ __forceinline__ Span span() const {
    const int first = span(0).first;
    return {first, max(first, span(layout.tokens - 1).end)};
  }

  // Whether a query sees a place of its span.
  __device__ __forceinline__ bool in_tree(int query, int place) const {
    if (tree == nullptr) return true;
    const int token = place - own(0);
    return token < 0 || (tree[query * layout.tree_query + (token >> 5)] >> (token & 31) & 1);
  }

  __device__ __forceinline__ bool sees(int query, int place) const {
    const Span seen = span(query);
    return place >= seen.first && place < seen.end && in_tree(query, place);
  }

  // Whether any query sees a place of the span of all; of new tokens a tree may hide some from all.
  __device__ __forceinline__ bool seen_by_any(int place) const {
    if (tree == nullptr || place < own(0)) return true;
    for (int query = 0; query < layout.tokens; ++query) {
      if (sees(query, place)) return true;
    }
    return false;
  }

  // Where the slot of a query's key, or the block id of a place that some query sees, is to be read.
  __device__ __forceinline__ const int* index_of(int query, int place) const {
    return indices + query * layout.indices_query + place;
  }
  __device__ __forceinline__ const int* block_of(int place, int block_size) const {
    return table + place / block_size;
  }

  // Byte offset in the cache of the row of a query's key, or NO_ROW. The place lies in the span of
  // any query, and no query matters but where each names its keys.
  __device__ __forceinline__ long long row_offset(int query, int place) const {
    const bool is_slot = layout.sparse;
    const int id = is_slot ? *index_of(query, place) : *block_of(place, layout.block_size);
    return row_offset_of(layout, id, place, layout.block_size, is_slot);
  }
};
