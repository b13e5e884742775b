// Tensor-core decode: ROWS query rows (heads of a request's new tokens) stay in shared memory and
// their results in registers while tiles of TOKENS keys pass by; a tile is loaded once and serves as
// keys and as values. Scores are split over the warps by rows and keys (and in QK_K ways by columns,
// to be added up), results by columns, so that every warp meets all probabilities in shared memory.
//
// Warps are one team, or two with half the rows each. Of two the second is late by its values: while
// the first is at scores, which take shared memory most, it is at values, which take tensor cores
// most, and the other way round.
#include "decode_results.cuh"
#include "overlap.cuh"

// What a block works on, and how far it has come with its share: in shared memory, since registers
// are needed for other things meanwhile.
struct Dealt {
  WorkItem item;
  int share_size, share_start, share_sequence;
};
static_assert(sizeof(Dealt) <= SHARED_BYTES - AT_DEALT, "no room for what is dealt");

// One item for one block of rows, from its queries to its results.
__device__ __forceinline__ void attend(const Block& block, const AllSequences& sequences,
                                       const char* cache, const Queries& queries,
                                       const Results& results, const WorkItem& item,
                                       int first_row, float scale, float value_scale) {
  const KeyLayout& layout = sequences.keys.layout;
  const RequestKeys keys(sequences.keys, sequences.request(item.sequence));
  const int query = sequences.first_query(item.sequence);
  const Span common = seen_by_all(keys);
  const Span span = keys.span();
  // Ids are copied a turn before their keys, and keys a turn before they are needed.
  bool complete = true;
  const auto copier_of = [&](int tile, int stage) {
    const bool wanted = tile < item.tiles.end;
    return KeyCopier(block, layout, span, cache, tile, stage, wanted);
  };
  const auto start_ids = [&](int tile) {
    if (tile < item.tiles.end) copy_ids(block, keys, span, query, tile);
  };
  start_ids(item.tiles.first);
  cp_async_wait_all();
  __syncthreads();
  load_queries(block, queries, sequences, item.sequence, first_row);
  KeyCopier first_copier = copier_of(item.tiles.first, 0);
#pragma unroll
  for (int piece = 0; piece < KeyCopier::PIECES; ++piece) first_copier.start(piece);
  complete = first_copier.complete;
  start_ids(item.tiles.first + 1);

  Softmax softmax;
  Sums sums;
  softmax.clear();
  clear(sums);
  // The late team has the values of a tile in the next turn.
  const bool late = STAGGERED && block.team == 1;
  for (int tile = item.tiles.first, stage = 0; tile < item.tiles.end + STAGGERED;
       ++tile, stage ^= 1) {
    const bool copied = !STAGGERED || tile < item.tiles.end;
    cp_async_wait_all();
    complete = __syncthreads_and(complete);
    if constexpr (PACKED) {
      restore_keys(block);
      __syncthreads();
    }
    if (late && tile > item.tiles.first) add_values(block, block.keys(stage ^ 1), sums);
    if (late || !copied) block.team_sync();
    if (!copied) break;
    KeyCopier copier = copier_of(tile + 1, stage ^ 1);
    start_ids(tile + 2);
    PartialScores partial;
    Scores scores;
    multiply_keys(block, block.keys(stage), copier, partial);
    add_halves(block, partial, scores);
    const int place = tile * TOKENS;
    mask(block, keys, span, first_row, tile, complete,
         place >= common.first && place + TOKENS <= common.end, scores);
    complete = copier.complete;
    softmax.add(block, scores, scale);
    if (!late) {
      block.team_sync();
      add_values(block, block.keys(stage), sums);
    }
  }
  cp_async_wait_all();
  write_results(block, results, sequences, item, first_row, queries.row_count, softmax, sums, scale,
                value_scale);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    decode_mma(const QUERY* __restrict__ q, const char* __restrict__ cache,
               const int* __restrict__ block_table, const int* __restrict__ seq_lens,
               const int* __restrict__ tree_mask, const int* __restrict__ indices,
               const KeyLayout layout, const RequestStrides q_strides, int sequence_count,
               int row_count, int groups, int cut_size, int most_parts, float softmax_scale,
               const float* __restrict__ q_descale, const float* __restrict__ k_scale,
               const float* __restrict__ sink, OUT* __restrict__ out,
               const RequestStrides out_strides, float* __restrict__ out_lse,
               const RequestStrides lse_strides, float from_natural,
               float* __restrict__ partials, float* __restrict__ partial_lses,
               int* __restrict__ parts) {
  wait_for_previous_kernel();
  extern __shared__ __align__(128) char shared[];
  const Block block(shared);
  const Keys keys = {block_table, seq_lens, tree_mask, indices, layout};
  const AllSequences sequences = {keys, sequence_count};
  const Queries queries = {q, q_strides, row_count};
  const Results results = {out,      out_strides,  out_lse, lse_strides, from_natural, sink,
                           partials, partial_lses, parts};
  const float of_rows = k_scale == nullptr ? 1.0f : k_scale[0];
  const float of_queries = q_descale == nullptr ? 1.0f : q_descale[0];
  const float scale = softmax_scale * of_queries * of_rows * LOG2_E;

  const int row_blocks = (row_count + ROWS - 1) / ROWS;
  const int row_block = blockIdx.x % row_blocks;
  Dealt& dealt = *reinterpret_cast<Dealt*>(shared + AT_DEALT);
  const auto work = [&](const WorkItem& item) {
    if (block.thread == 0) dealt.item = item;
    if (row_block == 0 && item.index == 0 && block.thread == 0) {
      int* of_sequence = parts + 3LL * item.sequence;
      of_sequence[0] = item.parts.count;
      of_sequence[1] = item.parts.first;
      of_sequence[2] = item.parts.rest;
    }
    __syncthreads();
    attend(block, sequences, cache, queries, results, dealt.item, row_block * ROWS, scale, of_rows);
  };
  if constexpr (CUT == SHARES) {
    int* sums = reinterpret_cast<int*>(shared + AT_SUMS);
    Share<TOKENS, OVERHEAD, THREADS, SPARSE> share(sequences, groups, blockIdx.x / row_blocks, sums);
    WorkItem item;
    while (share.next(item)) {
      __syncthreads();  // all have read what was dealt before
      if (block.thread == 0) {
        dealt.share_size = share.size;
        dealt.share_start = share.start;
        dealt.share_sequence = share.sequence;
      }
      work(item);
      share.size = dealt.share_size;
      share.start = dealt.share_start;
      share.sequence = dealt.share_sequence;
    }
  } else {
    const WorkItem item =
        part_of_sequence<CUT, TOKENS>(sequences, cut_size, most_parts, blockIdx.x / row_blocks);
    if (item.index == 0 || item.tiles.count() > 0) work(item);
  }
}
