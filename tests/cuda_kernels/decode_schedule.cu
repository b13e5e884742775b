// Writes out the items that each group of blocks gets: a row of `items` holds `room` of six numbers
// each, `counts` how many there are.
#include "../../sandbox/kernels/attention/decode_schedule.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    decode_items(const char* __restrict__ cache, const int* __restrict__ block_table,
                 const int* __restrict__ seq_lens, const int* __restrict__ tree_mask,
                 const int* __restrict__ indices, const KeyLayout layout, int sequence_count,
                 int groups, int size, int most, int room, int* __restrict__ items,
                 int* __restrict__ counts) {
  __shared__ int sums[THREADS / 32 + 3];
  const Keys keys = {block_table, seq_lens, tree_mask, indices, layout};
  const Sequences<SPARSE> sequences = {keys, sequence_count};
  int count = 0;
  const auto write = [&](const WorkItem& item) {
    if (threadIdx.x == 0 && count < room) {
      int* to = items + ((long long)blockIdx.x * room + count) * 6;
      to[0] = item.sequence;
      to[1] = item.tiles.first;
      to[2] = item.tiles.end;
      to[3] = item.index;
      to[4] = item.parts.count;
      to[5] = item.parts.slot(item.index);
    }
    ++count;
  };
  WorkItem item;
  if constexpr (CUT == SHARES) {
    Share<TOKENS, OVERHEAD, THREADS, SPARSE> share(sequences, groups, blockIdx.x, sums);
    while (share.next(item)) write(item);
  } else {
    item = part_of_sequence<CUT, TOKENS>(sequences, size, most, blockIdx.x);
    if (item.index == 0 || item.tiles.count() > 0) write(item);
  }
  if (threadIdx.x == 0) counts[blockIdx.x] = count;
}
