// A block a token rotates the rope columns of each of its heads; with slots, into the cache.
#include "cache_row.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    rope_columns(const ELEMENT* from, long long from_token_stride, long long from_head_stride,
                 const long long* __restrict__ positions, const float* __restrict__ cos_sin,
                 long long table_stride, long long table_rows, ELEMENT* to,
                 long long to_token_stride, long long to_head_stride,
                 const long long* __restrict__ slot_mapping, int block_size, long long capacity) {
  constexpr int SIZE = int(sizeof(ELEMENT));
  constexpr int PIECE = piece_bytes(VECTOR, SIZE);
  constexpr int PAIRS = PIECE / SIZE / 2;
  constexpr int PIECES = ROPE * SIZE / PIECE;
  const long long token = blockIdx.x;
  const RopeTable table = {cos_sin, table_stride, table_rows};
  const char* source = reinterpret_cast<const char*>(from) + token * from_token_stride;
  char* target = reinterpret_cast<char*>(to);
  if (slot_mapping == nullptr) {
    target += token * to_token_stride;
  } else {
    const PagedRows paged = {target, to_token_stride, to_head_stride, block_size, capacity};
    target = row_of(paged, slot_mapping[token]);
    if (target == nullptr) return;
  }
  for (int i = threadIdx.x; i < HEADS * PIECES; i += THREADS) {
    const int head = i / PIECES;
    const int piece = i - head * PIECES;
    const auto angles =
        angles_at<PAIRS, TABLE_VECTOR>(table, positions[token], ROPE / 2, piece * PAIRS);
    const auto value =
        load_piece<PIECE, VECTOR>(source + head * from_head_stride + piece * PIECE);
    store_piece<PIECE, VECTOR>(target + head * to_head_stride + piece * PIECE,
                               rotate<ELEMENT, PIECE>(value, angles));
  }
}
