// Who computes which keys: the tiles of all sequences dealt out to groups of blocks.
//
// In equal shares of all tiles, of which a share holds the end of one sequence, whole ones, and the
// beginning of another; or by the sequence, each in parts of its own, so that what becomes of one
// does not depend on the others.
#pragma once
#include "keys.cuh"

// What has keys of its own: a request, or each query where queries name their keys.
template <bool Sparse> struct Sequences {
  const Keys& keys;
  int count;

  __device__ __forceinline__ int request(int sequence) const {
    return Sparse ? sequence / keys.layout.tokens : sequence;
  }
  __device__ __forceinline__ int first_query(int sequence) const {
    return Sparse ? sequence % keys.layout.tokens : 0;
  }
};

// A sequence's tiles of keys from the first that some query may see.
struct TileRange {
  int first;
  int end;
  __device__ __forceinline__ int count() const { return end - first; }
};

template <int Tokens, bool Sparse>
__device__ __forceinline__ TileRange tiles_of(const Sequences<Sparse>& sequences, int sequence) {
  if (Sparse) return {0, (sequences.keys.layout.chosen + Tokens - 1) / Tokens};
  const Span seen = RequestKeys(sequences.keys, sequence).span();
  if (seen.first >= seen.end) return {0, 0};
  return {seen.first / Tokens, (seen.end + Tokens - 1) / Tokens};
}

// Where a sequence's partial results lie: one alone is the result and lies nowhere, else the first
// in slot `first` and number i > 0 in slot `rest + i`.
struct Parts {
  int count;
  int first;
  int rest;
  __device__ __forceinline__ int slot(int index) const { return index == 0 ? first : rest + index; }
};

struct WorkItem {
  int sequence;
  TileRange tiles;
  int index;  // of the part
  Parts parts;
};

// How sequences are cut. SHARES: where the shares of all work end. PIECES: every `size` tiles from
// the first position on. SPLITS: in `size` equal parts.
enum Cut { SHARES, PIECES, SPLITS };

// Part `number` of all, of which a sequence has at most `most`.
template <Cut Kind, int Tokens, bool Sparse>
__device__ __forceinline__ WorkItem part_of_sequence(const Sequences<Sparse>& sequences, int size,
                                                     int most, long long number) {
  WorkItem item;
  item.sequence = int(number / most);
  item.index = int(number - (long long)item.sequence * most);
  const TileRange all = tiles_of<Tokens>(sequences, item.sequence);
  const int piece = Kind == PIECES ? size : max(1, (all.count() + size - 1) / size);
  const int origin = Kind == PIECES ? all.first / piece * piece : all.first;
  item.tiles.first = max(all.first, origin + item.index * piece);
  item.tiles.end = min(all.end, origin + (item.index + 1) * piece);
  const int first_slot = item.sequence * most;
  item.parts = {max(1, (all.end - origin + piece - 1) / piece), first_slot, first_slot};
  return item;
}

// One of `shares` equal parts of all work. A sequence costs its tiles and OVERHEAD more, for its
// queries and its results.
template <int Tokens, int Overhead, int Threads, bool Sparse> struct Share {
  const Sequences<Sparse>& sequences;
  int shares;
  int mine;
  int size;   // of a share
  int start;  // of `sequence`
  int sequence;

  // By all threads; `sums` is shared memory for Threads / 32 + 3 numbers.
  __device__ __forceinline__ Share(const Sequences<Sparse>& sequences, int shares, int mine,
                                   int* sums)
      : sequences(sequences), shares(shares), mine(mine) {
    constexpr int Warps = Threads / 32;
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int each = (sequences.count + Threads - 1) / Threads;
    const int first = min(thread * each, sequences.count);
    const int end = min(first + each, sequences.count);
    int own = 0;
    for (int i = first; i < end; ++i) own += cost(tiles_of<Tokens>(sequences, i));
    int before = own;  // own and lower lanes', then all lower threads'
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, before, step);
      if (lane >= step) before += other;
    }
    if (lane == 31) sums[warp] = before;
    if (thread == 0) {  // of a share that begins after all work
      sums[Warps + 1] = sequences.count;
      sums[Warps + 2] = 0;
    }
    __syncthreads();
    before -= own;
    int total = 0;
#pragma unroll
    for (int i = 0; i < Warps; ++i) {
      if (i < warp) before += sums[i];
      total += sums[i];
    }
    size = max(1, (total + shares - 1) / shares);
    const int begin = mine * size;
    if (begin >= before && begin < before + own) {
      int found = first;
      for (;; ++found) {
        const int all = cost(tiles_of<Tokens>(sequences, found));
        if (begin < before + all) break;
        before += all;
      }
      sums[Warps + 1] = found;
      sums[Warps + 2] = before;
    }
    __syncthreads();
    sequence = sums[Warps + 1];
    start = sums[Warps + 2];
  }

  static __device__ __forceinline__ int cost(const TileRange& tiles) {
    return tiles.count() + Overhead;
  }

  // The next item of the share, or false. A share that ends within a sequence's overhead leaves it
  // to the next; a sequence without keys belongs to the share where it starts.
  __device__ __forceinline__ bool next(WorkItem& item) {
    const int begin = mine * size, end = begin + size;
    while (sequence < sequences.count && start < end) {
      const TileRange all = tiles_of<Tokens>(sequences, sequence);
      const int first_key = start + Overhead;
      const int skipped = max(0, begin - first_key);
      const int kept = max(0, min(all.count(), end - first_key));
      item.sequence = sequence;
      item.tiles = {all.first + skipped, all.first + kept};
      const int first_share = first_key / size;
      const int last_share = (first_key + max(1, all.count()) - 1) / size;
      item.index = mine - first_share;
      item.parts = {last_share - first_share + 1, shares + first_share, first_share};
      const bool empty = all.count() == 0 && start >= begin;
      if (empty) item.index = 0, item.parts.count = 1;
      start += cost(all);
      ++sequence;
      if (skipped < kept || empty) return true;
    }
    return false;
  }
};
