// A token's row [kv_c | k_pe] of the paged cache: where it stands, and a block that writes it.
#pragma once
#include "packed_row.cuh"

struct PagedRows {
  char* base;
  long long page_stride;  // bytes
  long long row_stride;   // bytes
  int block_size;
  long long capacity;  // slots
};

// The row of a slot, or null where nothing may be written: below 0, or beyond the cache.
__device__ __forceinline__ char* row_of(const PagedRows& cache, long long slot) {
  if (slot < 0 || slot >= cache.capacity) return nullptr;
  long long page;
  if (slot >> 32) {
    page = slot / cache.block_size;
  } else {  // a 32-bit division is several times faster
    page = (unsigned int)slot / (unsigned int)cache.block_size;
  }
  return cache.base + page * cache.page_stride +
         (slot - page * cache.block_size) * cache.row_stride;
}

// Bytes of a piece of the rotated columns: whole pairs, even where accesses are narrower.
constexpr int piece_bytes(int vector, int element) {
  return vector > 2 * element ? vector : 2 * element;
}

// A piece of BYTES by coherent accesses of Access bytes: q may be rewritten by this very kernel.
template <int BYTES, int Access>
__device__ __forceinline__ Vector<BYTES> load_piece(const char* from) {
  Vector<BYTES> piece;
#pragma unroll
  for (int i = 0; i < BYTES; i += Access) {
    const auto part = __ldcs(reinterpret_cast<const Vector<Access>*>(from + i));
    memcpy(reinterpret_cast<char*>(&piece) + i, &part, Access);
  }
  return piece;
}

template <int BYTES, int Access>
__device__ __forceinline__ void store_piece(char* to, const Vector<BYTES>& piece) {
#pragma unroll
  for (int i = 0; i < BYTES; i += Access) {
    Vector<Access> part;
    memcpy(&part, reinterpret_cast<const char*>(&piece) + i, Access);
    store_once<Access>(to + i, part);
  }
}

// All threads of a block write one row in the cache's format: the latent, then k_pe, rotated if
// there is a table. Sources are read in accesses of Access bytes, the row is written in accesses of
// CacheAccess; `k_scale` is the descale of the formats that need one.
template <class Scalar, CacheFormat Format, bool Pow2, int Latent, int Rope, int Access,
          int CacheAccess, int TableAccess, int Threads>
__device__ __forceinline__ void insert_row(const char* kv_c, const char* k_pe,
                                           const RopeTable& table, long long position, char* row,
                                           const float* k_scale) {
  if (row == nullptr) return;
  if constexpr (Format == PLAIN) {
    constexpr int SIZE = int(sizeof(Scalar));
    constexpr int STEP = least(Access, CacheAccess);
    constexpr int PIECE = piece_bytes(STEP, SIZE);
    constexpr int LATENTS = Latent * SIZE / STEP;
    constexpr int PIECES = Rope * SIZE / PIECE;
    for (int i = threadIdx.x; i < LATENTS + PIECES; i += Threads) {
      if (i < LATENTS) {
        store_once<STEP>(row + i * STEP, load_once<STEP>(kv_c + i * STEP));
      } else {
        constexpr int PAIRS = PIECE / SIZE / 2;
        const int piece = i - LATENTS;
        auto key = load_piece<PIECE, STEP>(k_pe + piece * PIECE);
        if (table.rows != nullptr) {
          key = rotate<Scalar, PIECE>(key, angles_at<PAIRS, least(TableAccess, 4 * PAIRS)>(
                                               table, position, Rope / 2, piece * PAIRS));
        }
        store_piece<PIECE, STEP>(row + Latent * SIZE + piece * PIECE, key);
      }
    }
  } else {
    PackedRow<Scalar, Format, Pow2, Latent, Rope, Access, CacheAccess, TableAccess, Threads> packed;
    packed.load(kv_c, k_pe, table, position, k_scale, threadIdx.x);
    packed.store(row);
  }
}
