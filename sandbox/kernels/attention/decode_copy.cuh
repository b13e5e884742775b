// Queries and tiles of keys from global to shared memory.
#pragma once
#include "decode_block.cuh"
#include "strides.cuh"

struct Queries {
  const QUERY* q;
  const RequestStrides& strides;
  int row_count;  // of a sequence
};

// Queries of a block to shared memory; rows that do not exist are zeros.
__device__ __forceinline__ void load_queries(const Block& block, const Queries& queries,
                                             const AllSequences& sequences, int sequence,
                                             int first_row) {
  const int part = block.thread % 8;
#pragma unroll 1
  for (int row = block.thread / 8; row < ROWS; row += THREADS / 8) {
    const bool exists = first_row + row < queries.row_count;
    const Row from(sequences, sequence, exists ? first_row + row : 0);
    const QUERY* source = queries.q + queries.strides(from.request, from.query, from.head);
#pragma unroll
    for (int first = 0; first < QueryTile::PIECES; first += 8) {
      const int piece = first + part;
      if (first + 8 > QueryTile::PIECES && piece >= QueryTile::PIECES) break;
      char* to = block.shared + QueryTile::place(row, piece);
      const bool real = exists && (first * 8 + 64 <= WIDTH || piece * 8 < WIDTH);
      if constexpr (sizeof(QUERY) == 2) {
        cp_async_if<16>(real, shared_address_of(to), source + piece * 8);
      } else {
        float values[8] = {};
        if (real) unpack_fp8<E4M3, 8>(load_once<8>(source + piece * 8), values);
        *reinterpret_cast<uint4*>(to) = pack<ELEMENT, 16>(values);
      }
    }
  }
}

// Starts to copy the ids of a tile's keys, a thread an id; negative ones stand for places that no
// query sees.
__device__ __forceinline__ void copy_ids(const Block& block, const RequestKeys& keys,
                                         const Span& span, int query, int tile) {
  static_assert(TOKENS <= COPY_THREADS, "a thread a key");
  const int row = block.copy_thread(), place = tile * TOKENS + row;
  if (row < 0 || row >= (ONE_BLOCK ? 1 : TOKENS)) return;
  int* to = block.ids(tile) + row;
  const bool inside = place >= span.first && place < span.end;
  if (ONE_BLOCK || (inside && (!TREE || keys.seen_by_any(place)))) {
    cp_async<4>(to, SPARSE ? keys.index_of(query, place) : keys.block_of(place, BLOCK_SIZE));
  } else {
    *to = -1;
  }
}

// Whether there is a key in a row of a tile.
__device__ __forceinline__ bool key_exists(const Block& block, const KeyLayout& layout,
                                           const Span& span, int tile, int row) {
  const int place = tile * TOKENS + row;
  const bool inside = !ONE_BLOCK || (place >= span.first && place < span.end);
  return inside && is_row(layout, block.ids(tile)[ONE_BLOCK ? 0 : row], BLOCK_SIZE, SPARSE);
}

// Copies a tile of keys whose ids are there, eight threads a row; a key that is not there is zeros.
// Pieces are started one by one, so that other work can go on between.
struct KeyCopier {
  static constexpr int IN_ROW = (ROW_ROOM + 8 * COPY_BYTES - 1) / (8 * COPY_BYTES);
  static constexpr int PIECES = PASSES * IN_ROW;

  const KeyLayout& layout;
  const char* cache;
  const int* ids;
  int first_place;
  Span inside;  // places of keys, where the block is the same for all
  bool active;
  bool complete = true;  // whether there was a key in each row so far
  int row, part;
  SharedAddress to;
  const char* from = nullptr;  // the row of this pass
  unsigned int there;          // whether it exists

  __device__ __forceinline__ KeyCopier(const Block& block, const KeyLayout& layout,
                                       const Span& span, const char* cache, int tile, int stage,
                                       bool wanted)
      : layout(layout),
        cache(cache),
        ids(block.ids(tile)),
        first_place(tile * TOKENS),
        inside(span),
        active(wanted && block.copy_thread() >= 0),
        row(block.copy_thread() / 8),
        part(block.copy_thread() % 8) {
    const char* first = PACKED
                            ? block.shared + AT_RAW + row * RAW_STRIDE + part * COPY_BYTES
                            : block.keys(stage) + KeyTile::place(row, part);
    to = fresh(shared_address_of(first));
    if (ONE_BLOCK && active) {
      const int id = ids[0];
      if (!is_row(layout, id, BLOCK_SIZE, false)) inside.end = 0;
      const long long offset = row_offset_of(layout, id, first_place, BLOCK_SIZE, false);
      from = cache + max(offset, 0LL) + row * layout.row_stride + part * COPY_BYTES;
    }
  }

  // From the first piece of a row on, `from` and `there` are those of the row.
  __device__ __forceinline__ void find(int pass, int key) {
    bool exists;
    if constexpr (ONE_BLOCK) {
      const int place = first_place + key;
      exists = place >= inside.first && place < inside.end;
      if (pass > 0) from += ROWS_AT_ONCE * layout.row_stride;
    } else {
      const long long offset =
          row_offset_of(layout, ids[key], first_place + key, BLOCK_SIZE, SPARSE);
      exists = offset >= 0;
      from = cache + max(offset, 0LL) + part * COPY_BYTES;
    }
    complete &= exists;
    there = fresh((unsigned int)exists);
  }

  __device__ __forceinline__ void start(int piece) {
    const int pass = piece / IN_ROW, at = piece % IN_ROW * 8 * COPY_BYTES;
    const int key = pass * ROWS_AT_ONCE + row;
    constexpr int PASS_BYTES = ROWS_AT_ONCE * (PACKED ? RAW_STRIDE : KeyTile::STRIDE * 16);
    const bool inside = at + 8 * COPY_BYTES <= ROW_ROOM || at + part * COPY_BYTES < ROW_ROOM;
    const bool real = at + 8 * COPY_BYTES <= RAW_BYTES || at + part * COPY_BYTES < RAW_BYTES;
    if (!active || (TOKENS % ROWS_AT_ONCE != 0 && key >= TOKENS)) return;
    if (at == 0) find(pass, key);
    if (inside) {
      cp_async_if<COPY_BYTES>(real ? there : 0, to + pass * PASS_BYTES + at, from + at);
    }
  }
};

// Packed rows in shared memory to a tile of numbers, without the descale that all rows share.
__device__ __forceinline__ void restore_keys(const Block& block) {
  using Reader = RowReader<FORMAT, LATENT, ROPE, 8, SharedMemory>;
  constexpr int IN_ROW = WIDTH / 8;
#pragma unroll 2
  for (int i = block.thread; i < TOKENS * KeyTile::PIECES; i += THREADS) {
    const int row = i / KeyTile::PIECES, piece = i % KeyTile::PIECES;
    float values[8] = {};
    if (KeyTile::PIECES == IN_ROW || piece < IN_ROW) {
      const char* from = block.shared + AT_RAW + row * RAW_STRIDE;
      Reader::restore(Reader::load(from, piece * 8, 1.0f), piece * 8, values);
    }
    *reinterpret_cast<uint4*>(block.keys(0) + KeyTile::place(row, piece)) =
        pack<ELEMENT, 16>(values);
  }
}
