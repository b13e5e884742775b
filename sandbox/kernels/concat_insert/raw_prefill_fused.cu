// A block a token, or some of its heads: position, angles and k_pe are read once and serve every
// head; the copies keep several loads in flight; the cache row is written along the way.
#include "cache_row.cuh"

// Columns of several heads as one flat run of vectors.
template <int VECTORS>
__device__ __forceinline__ void copy_columns(const char* from, long long from_stride, char* to,
                                             long long to_stride, int heads) {
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

// The rope columns of several heads of q and of k. A thread stays at its columns, so that the
// angles and the rotated key remain in registers while it walks over the heads.
__device__ __forceinline__ void write_rope(const char* q, long long q_stride, char* q_out,
                                           long long q_out_stride, const char* k_pe, char* k_out,
                                           long long k_out_stride, const RopeTable& table,
                                           long long position, int heads) {
  constexpr int SIZE = int(sizeof(ELEMENT));
  constexpr int PIECE = piece_bytes(VECTOR, SIZE);
  constexpr int PAIRS = PIECE / SIZE / 2;
  constexpr int PIECES = ROPE * SIZE / PIECE;
  constexpr int LANES = PIECES == 0 ? 1 : PIECES < THREADS ? PIECES : THREADS;
  constexpr int STEP = THREADS / LANES;
  constexpr int BATCH = IN_FLIGHT / 2 > 0 ? IN_FLIGHT / 2 : 1;
  const bool rotated = table.rows != nullptr;
  const int first_head = threadIdx.x / LANES;
  if (first_head >= STEP) return;
#pragma unroll 1
  for (int piece = threadIdx.x % LANES; piece < PIECES; piece += LANES) {
    auto key = load_piece<PIECE, VECTOR>(k_pe + piece * PIECE);
    Angles<PAIRS> angles;
    if (rotated) {
      angles = angles_at<PAIRS, TABLE_VECTOR>(table, position, ROPE / 2, piece * PAIRS);
      key = rotate<ELEMENT, PIECE>(key, angles);
    }
#pragma unroll 1
    for (int first = first_head; first < heads; first += STEP * BATCH) {
      Vector<PIECE> values[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        const int head = first + STEP * i;
        if (head < heads && (rotated || q != q_out)) {
          values[i] = load_piece<PIECE, VECTOR>(q + head * q_stride + piece * PIECE);
        }
      }
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        const int head = first + STEP * i;
        if (head < heads) {
          store_piece<PIECE, VECTOR>(k_out + head * k_out_stride + piece * PIECE, key);
        }
      }
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        const int head = first + STEP * i;
        if (head < heads && (rotated || q != q_out)) {
          if (rotated) values[i] = rotate<ELEMENT, PIECE>(values[i], angles);
          store_piece<PIECE, VECTOR>(q_out + head * q_out_stride + piece * PIECE, values[i]);
        }
      }
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
  constexpr int NOPE_BYTES = NOPE * int(sizeof(ELEMENT));
  const long long token = blockIdx.x;
  const int first_head = blockIdx.y * heads_a_block;
  const int heads = HEADS - first_head < heads_a_block ? HEADS - first_head : heads_a_block;
  const long long position = positions == nullptr ? 0 : __ldg(positions + token);
  const long long slot = __ldg(slot_mapping + token);
  const RopeTable table = {cos_sin, table_stride, table_rows};
  const char* query =
      reinterpret_cast<const char*>(q) + token * q_token_stride + first_head * q_head_stride;
  char* query_out = reinterpret_cast<char*>(q_out) + token * q_out_token_stride +
                    first_head * q_out_head_stride;
  char* key_out = reinterpret_cast<char*>(k_out) + token * k_out_token_stride +
                  first_head * k_out_head_stride;
  const char* latent = reinterpret_cast<const char*>(kv_c) + token * kv_c_stride;
  const char* rope_key = reinterpret_cast<const char*>(k_pe) + token * k_pe_stride;

  copy_columns<NOPE_BYTES / VECTOR>(reinterpret_cast<const char*>(k_nope) +
                                        token * k_nope_token_stride +
                                        first_head * k_nope_head_stride,
                                    k_nope_head_stride, key_out, k_out_head_stride, heads);
  if (q != q_out) {
    copy_columns<NOPE_BYTES / VECTOR>(query, q_head_stride, query_out, q_out_head_stride, heads);
  }
  write_rope(query + NOPE_BYTES, q_head_stride, query_out + NOPE_BYTES, q_out_head_stride,
             rope_key, key_out + NOPE_BYTES, k_out_head_stride, table, position, heads);
  if (blockIdx.y == 0) {
    const PagedRows paged = {reinterpret_cast<char*>(cache), page_stride, row_stride, block_size,
                             capacity};
    insert_row<ELEMENT, LATENT, ROPE, VECTOR, TABLE_VECTOR, THREADS>(latent, rope_key, table,
                                                                     position, row_of(paged, slot));
  }
}
