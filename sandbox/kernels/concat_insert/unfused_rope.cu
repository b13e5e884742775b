// A block a token rotates the rope columns of each of its heads, or, without a table, only converts
// them: to elements, to a query's codes, or, with slots, to what the cache's rows hold.
#include "cache_row.cuh"

template <int Count>
__device__ __forceinline__ void store_numbers(char* to, const float (&numbers)[Count],
                                              const float* scale) {
  if constexpr (FP8_QUERY) {
    store_by<TARGET_VECTOR>(to, head_codes(numbers, 1.0f / __ldg(scale)));
  } else if constexpr (FORMAT == PLAIN) {
    store_by<TARGET_VECTOR>(to, pack<ELEMENT, Count * int(sizeof(ELEMENT))>(numbers));
  } else if constexpr (FORMAT == FP8_DS_MLA) {
    store_by<TARGET_VECTOR>(to, pack<__nv_bfloat16, 2 * Count>(numbers));
  } else {
    store_by<TARGET_VECTOR>(to, Coder<FORMAT, false>(__ldg(scale))(numbers));
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    rope_columns(const ELEMENT* from, long long from_token_stride, long long from_head_stride,
                 const long long* __restrict__ positions, const float* __restrict__ cos_sin,
                 long long table_stride, long long table_rows, char* to,
                 long long to_token_stride, long long to_head_stride,
                 const float* __restrict__ scale, const long long* __restrict__ slot_mapping,
                 int block_size, long long capacity) {
  constexpr int SIZE = int(sizeof(ELEMENT));
  constexpr int PIECE = piece_bytes(VECTOR, SIZE);
  constexpr int PAIRS = PIECE / SIZE / 2;
  constexpr int PIECES = ROPE * SIZE / PIECE;
  constexpr int STEP = TARGET_BYTES / PIECES;
  const long long token = blockIdx.x;
  const RopeTable table = {cos_sin, table_stride, table_rows};
  const char* source = reinterpret_cast<const char*>(from) + token * from_token_stride;
  if (slot_mapping == nullptr) {
    to += token * to_token_stride;
  } else {
    const PagedRows paged = {to, to_token_stride, to_head_stride, block_size, capacity};
    to = row_of(paged, slot_mapping[token]);
    if (to == nullptr) return;
  }
  for (int i = threadIdx.x; i < HEADS * PIECES; i += THREADS) {
    const int head = i / PIECES;
    const int piece = i - head * PIECES;
    const auto bits = load_piece<PIECE, VECTOR>(source + head * from_head_stride + piece * PIECE);
    float numbers[2 * PAIRS];
    unpack<ELEMENT, PIECE>(bits, numbers);
    if (cos_sin != nullptr) {
      rotate_pairs(numbers, angles_at<PAIRS, TABLE_VECTOR>(table, positions[token], ROPE / 2,
                                                           piece * PAIRS));
    }
    store_numbers(to + head * to_head_stride + piece * STEP, numbers, scale);
  }
}
