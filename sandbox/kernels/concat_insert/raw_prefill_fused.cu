// Two blocks a token, one for its queries, one for its keys and its cache row, or as many pairs as
// it takes to fill the GPU. Position, angles and k_pe are read once and serve every head: a thread
// stays at its columns while it walks over the heads, with several loads in flight.
#include "cache_row.cuh"
#include "overlap.cuh"

constexpr int SIZE = int(sizeof(ELEMENT));
constexpr int PIECE = piece_bytes(VECTOR, SIZE);
constexpr int PAIRS = PIECE / SIZE / 2;
constexpr int PIECES = ROPE * SIZE / PIECE;
constexpr int LANES = PIECES == 0 ? 1 : PIECES < THREADS ? PIECES : THREADS;
constexpr int STEP = THREADS / LANES;  // heads that the block turns at a time

__device__ __forceinline__ void copy_nope(const char* from, long long from_stride, char* to,
                                          long long to_stride, int heads) {
  constexpr int VECTORS = NOPE * SIZE / VECTOR;
#pragma unroll 1
  for (int first = threadIdx.x; first < heads * VECTORS; first += THREADS * IN_FLIGHT) {
    Vector<VECTOR> values[IN_FLIGHT];
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      const int vector = first + THREADS * i;
      if (vector < heads * VECTORS) {
        const int head = vector / VECTORS;
        values[i] =
            load_once<VECTOR>(from + head * from_stride + (vector - head * VECTORS) * VECTOR);
      }
    }
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
      const int vector = first + THREADS * i;
      if (vector < heads * VECTORS) {
        const int head = vector / VECTORS;
        store_once<VECTOR>(to + head * to_stride + (vector - head * VECTORS) * VECTOR, values[i]);
      }
    }
  }
}

__device__ __forceinline__ void rotate_queries(const char* from, long long from_stride, char* to,
                                               long long to_stride, const RopeTable& table,
                                               long long position, int heads) {
  if (threadIdx.x >= LANES * STEP) return;  // the rest would turn heads a second time
#pragma unroll 1
  for (int piece = threadIdx.x % LANES; piece < PIECES; piece += LANES) {
#pragma unroll 1
    for (int first = threadIdx.x / LANES; first < heads; first += STEP * IN_FLIGHT) {
      Vector<PIECE> values[IN_FLIGHT];
#pragma unroll
      for (int i = 0; i < IN_FLIGHT; ++i) {
        const int head = first + STEP * i;
        if (head < heads) {
          values[i] = load_piece<PIECE, VECTOR>(from + head * from_stride + piece * PIECE);
        }
      }
      Angles<PAIRS> angles;  // wanted only now, so that the heads do not wait for the position
      if (table.rows != nullptr) {
        angles = angles_at<PAIRS, TABLE_VECTOR>(table, position, ROPE / 2, piece * PAIRS);
      }
#pragma unroll
      for (int i = 0; i < IN_FLIGHT; ++i) {
        const int head = first + STEP * i;
        if (head < heads) {
          if (table.rows != nullptr) values[i] = rotate<ELEMENT, PIECE>(values[i], angles);
          store_piece<PIECE, VECTOR>(to + head * to_stride + piece * PIECE, values[i]);
        }
      }
    }
  }
}

__device__ __forceinline__ void spread_key(const char* from, char* to, long long to_stride,
                                           const RopeTable& table, long long position, int heads) {
  if (threadIdx.x >= LANES * STEP) return;
#pragma unroll 1
  for (int piece = threadIdx.x % LANES; piece < PIECES; piece += LANES) {
    auto key = load_piece<PIECE, VECTOR>(from + piece * PIECE);
    if (table.rows != nullptr) {
      key = rotate<ELEMENT, PIECE>(
          key, angles_at<PAIRS, TABLE_VECTOR>(table, position, ROPE / 2, piece * PAIRS));
    }
#pragma unroll IN_FLIGHT
    for (int head = threadIdx.x / LANES; head < heads; head += STEP) {
      store_piece<PIECE, VECTOR>(to + head * to_stride + piece * PIECE, key);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    prefill_fused(const ELEMENT* q, long long q_token_stride, long long q_head_stride,
                  const ELEMENT* k_nope, long long k_nope_token_stride,
                  long long k_nope_head_stride, const ELEMENT* k_pe, long long k_pe_stride,
                  const ELEMENT* kv_c, long long kv_c_stride, ELEMENT* cache,
                  long long page_stride, long long row_stride, int block_size, long long capacity,
                  const long long* slot_mapping, const long long* positions, const float* cos_sin,
                  long long table_stride, long long table_rows, ELEMENT* q_out,
                  long long q_out_token_stride, long long q_out_head_stride, ELEMENT* k_out,
                  long long k_out_token_stride, long long k_out_head_stride, int heads_a_block) {
  wait_for_previous_kernel();
  const bool in_place = q == q_out;
  const long long token = blockIdx.x >> 1;
  const int first_head = blockIdx.y * heads_a_block;
  const int heads = HEADS - first_head < heads_a_block ? HEADS - first_head : heads_a_block;
  const long long position = positions == nullptr ? 0 : __ldg(positions + token);
  const RopeTable table = {cos_sin, table_stride, table_rows};
  if (blockIdx.x & 1) {
    const char* from =
        reinterpret_cast<const char*>(q) + token * q_token_stride + first_head * q_head_stride;
    char* to = reinterpret_cast<char*>(q_out) + token * q_out_token_stride +
               first_head * q_out_head_stride;
    if (!in_place) copy_nope(from, q_head_stride, to, q_out_head_stride, heads);
    if (!in_place || cos_sin != nullptr) {
      rotate_queries(from + NOPE * SIZE, q_head_stride, to + NOPE * SIZE, q_out_head_stride, table,
                     position, heads);
    }
    return;
  }
  const long long slot = __ldg(slot_mapping + token);
  const char* rope_key = reinterpret_cast<const char*>(k_pe) + token * k_pe_stride;
  char* to = reinterpret_cast<char*>(k_out) + token * k_out_token_stride +
             first_head * k_out_head_stride;
  copy_nope(reinterpret_cast<const char*>(k_nope) + token * k_nope_token_stride +
                first_head * k_nope_head_stride,
            k_nope_head_stride, to, k_out_head_stride, heads);
  spread_key(rope_key, to + NOPE * SIZE, k_out_head_stride, table, position, heads);
  if (blockIdx.y == 0) {
    const PagedRows paged = {reinterpret_cast<char*>(cache), page_stride, row_stride, block_size,
                             capacity};
    insert_row<ELEMENT, LATENT, ROPE, VECTOR, TABLE_VECTOR, THREADS>(
        reinterpret_cast<const char*>(kv_c) + token * kv_c_stride, rope_key, table, position,
        row_of(paged, slot));
  }
}
