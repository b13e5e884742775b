// Blocks of keys, then blocks of queries, each a token or, where tokens are few, some heads of one:
// all of the GPU works on one stream of memory at a time, which is faster than on both at once. A
// thread stays at its columns while it walks over the heads, so nothing is divided, position, angles
// and k_pe are read once, and rows are written head after head without a gap. Loads are under way
// before the angles are known.
#include "cache_row.cuh"
#include "overlap.cuh"
#include "residency.cuh"

constexpr int SIZE = int(sizeof(ELEMENT));
constexpr int PIECE = piece_bytes(VECTOR, SIZE);
constexpr int PAIRS = PIECE / SIZE / 2;
constexpr int PIECES = ROPE * SIZE / PIECE;
constexpr int NOPES = NOPE * SIZE / VECTOR;
constexpr int ITEMS = NOPES + PIECES;  // of a head

// Threads that share a head of so many items.
constexpr int lanes_of(int items) { return items == 0 ? 1 : items < THREADS ? items : THREADS; }

// A vector in the first bytes of a piece, which is wider where accesses are narrower than a pair.
template <int BYTES>
__device__ __forceinline__ void set_vector(Vector<PIECE>& piece, const Vector<BYTES>& vector) {
  memcpy(&piece, &vector, BYTES);
}
template <int BYTES>
__device__ __forceinline__ Vector<BYTES> get_vector(const Vector<PIECE>& piece) {
  Vector<BYTES> vector;
  memcpy(&vector, &piece, BYTES);
  return vector;
}

__device__ __forceinline__ Angles<PAIRS> angles_of(const RopeTable& table,
                                                   const long long* position, int piece) {
  return angles_at<PAIRS, TABLE_VECTOR>(table, __ldg(position), ROPE / 2, piece * PAIRS);
}

// The block's heads of q_out; only their rotated items where q_out is q.
__device__ __forceinline__ void write_queries(const char* from, long long from_stride, char* to,
                                              long long to_stride, const RopeTable& table,
                                              const long long* position, int heads) {
  constexpr int FIRST = IN_PLACE ? NOPES : 0;
  constexpr int LANES = lanes_of(ITEMS - FIRST);
  constexpr int STEP = THREADS / LANES;  // heads that the block takes at a time
  if (threadIdx.x >= LANES * STEP) return;  // the rest would turn heads a second time
#pragma unroll 1
  for (int item = FIRST + threadIdx.x % LANES; item < ITEMS; item += LANES) {
    const int piece = item - NOPES;  // negative: a vector that is not rotated
    const int offset = piece < 0 ? item * VECTOR : NOPE * SIZE + piece * PIECE;
    Angles<PAIRS> angles;
#pragma unroll 1
    for (int first = threadIdx.x / LANES; first < heads; first += STEP * QUERIES_IN_FLIGHT) {
      Vector<PIECE> values[QUERIES_IN_FLIGHT];
#pragma unroll
      for (int i = 0; i < QUERIES_IN_FLIGHT; ++i) {
        const char* row = from + (first + STEP * i) * from_stride + offset;
        if (first + STEP * i >= heads) break;
        if (piece < 0) {
          set_vector<VECTOR>(values[i], load_once<VECTOR>(row));
        } else {
          values[i] = load_piece<PIECE, VECTOR>(row);
        }
      }
      const bool turns = piece >= 0 && table.rows != nullptr;
      if (turns && first < STEP) angles = angles_of(table, position, piece);
#pragma unroll
      for (int i = 0; i < QUERIES_IN_FLIGHT; ++i) {
        char* row = to + (first + STEP * i) * to_stride + offset;
        if (first + STEP * i >= heads) break;
        if (turns) values[i] = rotate<ELEMENT, PIECE>(values[i], angles);
        if (piece < 0) {
          store_once<VECTOR>(row, get_vector<VECTOR>(values[i]));
        } else {
          store_piece<PIECE, VECTOR>(row, values[i]);
        }
      }
    }
  }
}

// k_out of the block's heads.
__device__ __forceinline__ void write_keys(const char* k_nope, long long k_nope_stride,
                                           const char* k_pe, char* to, long long to_stride,
                                           const RopeTable& table, const long long* position,
                                           int heads) {
  constexpr int LANES = lanes_of(ITEMS);
  constexpr int STEP = THREADS / LANES;
  if (threadIdx.x >= LANES * STEP) return;
#pragma unroll 1
  for (int item = threadIdx.x % LANES; item < ITEMS; item += LANES) {
    const int piece = item - NOPES;  // negative: the item is a vector of k_nope
    Vector<PIECE> key;
#pragma unroll 1
    for (int first = threadIdx.x / LANES; first < heads; first += STEP * KEYS_IN_FLIGHT) {
      Vector<VECTOR> values[KEYS_IN_FLIGHT];
#pragma unroll
      for (int i = 0; i < KEYS_IN_FLIGHT; ++i) {
        const int head = first + STEP * i;
        if (piece < 0 && head < heads) {
          values[i] = load_once<VECTOR>(k_nope + head * k_nope_stride + item * VECTOR);
        }
      }
      if (piece >= 0 && first < STEP) {
        key = load_piece<PIECE, VECTOR>(k_pe + piece * PIECE);
        if (table.rows != nullptr) {
          key = rotate<ELEMENT, PIECE>(key, angles_of(table, position, piece));
        }
      }
#pragma unroll
      for (int i = 0; i < KEYS_IN_FLIGHT; ++i) {
        const int head = first + STEP * i;
        if (head >= heads) break;
        char* row = to + head * to_stride;
        if (piece < 0) {
          store_once<VECTOR>(row + item * VECTOR, values[i]);
        } else {
          store_piece<PIECE, VECTOR>(row + NOPE * SIZE + piece * PIECE, key);
        }
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, resident_blocks(BLOCKS_PER_SM))
    prefill_fused(const ELEMENT* q, long long q_token_stride, long long q_head_stride,
                  const ELEMENT* k_nope, long long k_nope_token_stride,
                  long long k_nope_head_stride, const ELEMENT* kv_c, long long kv_c_stride,
                  const ELEMENT* k_pe, long long k_pe_stride, char* cache, long long page_stride,
                  long long row_stride, int block_size, long long capacity, const float* k_scale,
                  const long long* slot_mapping, const long long* positions, const float* cos_sin,
                  long long table_stride, long long table_rows, ELEMENT* q_out,
                  long long q_out_token_stride, long long q_out_head_stride, ELEMENT* k_out,
                  long long k_out_token_stride, long long k_out_head_stride, int heads_a_block) {
  wait_for_previous_kernel();
  const int tokens = gridDim.x / 2;
  const bool queries = blockIdx.x >= tokens;
  const long long token = queries ? blockIdx.x - tokens : blockIdx.x;
  const int first_head = blockIdx.y * heads_a_block;
  const int heads = HEADS - first_head < heads_a_block ? HEADS - first_head : heads_a_block;
  const long long* position = positions + token;
  const RopeTable table = {cos_sin, table_stride, table_rows};
  if (queries) {
    const char* from =
        reinterpret_cast<const char*>(q) + token * q_token_stride + first_head * q_head_stride;
    char* to = reinterpret_cast<char*>(q_out) + token * q_out_token_stride +
               first_head * q_out_head_stride;
    if (!IN_PLACE || cos_sin != nullptr) {
      write_queries(from, q_head_stride, to, q_out_head_stride, table, position, heads);
    }
    return;
  }

  const char* rope_key = reinterpret_cast<const char*>(k_pe) + token * k_pe_stride;
  if (blockIdx.y == 0) {
    const PagedRows paged = {cache, page_stride, row_stride, block_size, capacity};
    insert_row<ELEMENT, FORMAT, POW2, LATENT, ROPE, VECTOR, CACHE_VECTOR, TABLE_VECTOR, THREADS>(
        reinterpret_cast<const char*>(kv_c) + token * kv_c_stride, rope_key, table,
        positions == nullptr ? 0 : __ldg(position), row_of(paged, __ldg(slot_mapping + token)),
        k_scale);
  }
  write_keys(reinterpret_cast<const char*>(k_nope) + token * k_nope_token_stride +
                 first_head * k_nope_head_stride,
             k_nope_head_stride, rope_key,
             reinterpret_cast<char*>(k_out) + token * k_out_token_stride +
                 first_head * k_out_head_stride,
             k_out_head_stride, table, position, heads);
}
