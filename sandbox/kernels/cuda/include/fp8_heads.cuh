// Heads of a token as E4M3 codes of value * (1 / descale).
//
// A thread stays at its Count columns while it walks over the heads, so that nothing is divided and
// what all heads share is read once.
#pragma once
#include "fp8.cuh"

// The thread's columns of a token's heads; strides are bytes from head to head. A `from_stride` of 0
// says that all heads have these columns in common.
struct HeadColumns {
  const char* from;
  long long from_stride;
  char* to;
  long long to_stride;
  const float* descale;
};

// Heads first, first + step, ... below end.
struct HeadWalk {
  int first, step, end;
};

// Calls visit(item, walk) for the thread's items, of Items that each head has: neighbouring threads
// have neighbouring items, and the block takes as many heads at a time as it has threads for.
template <int Items, int Threads, class Visit>
__device__ __forceinline__ void walk_items(int heads, Visit visit) {
  constexpr int LANES = Items < Threads ? Items : Threads;
  constexpr int STEP = Threads / LANES;
  if (threadIdx.x >= LANES * STEP) return;  // the rest would take heads a second time
  const HeadWalk walk = {int(threadIdx.x) / LANES, STEP, heads};
#pragma unroll 1
  for (int item = threadIdx.x % LANES; item < Items; item += LANES) visit(item, walk);
}

// Count elements as they were loaded.
template <class Scalar, int Count> struct Elements {
  static constexpr int BYTES = Count * int(sizeof(Scalar));
  static constexpr int ACCESS = BYTES < 16 ? BYTES : 16;
  Vector<ACCESS> parts[BYTES / ACCESS];

  __device__ __forceinline__ void load(const char* from) {
    if constexpr (BYTES == ACCESS) {
      parts[0] = load_once<ACCESS>(from);
    } else {  // several loads take turns at a sector, which L1 has to keep
#pragma unroll
      for (int i = 0; i < BYTES / ACCESS; ++i) {
        parts[i] = __ldg(reinterpret_cast<const Vector<ACCESS>*>(from) + i);
      }
    }
  }

  __device__ __forceinline__ void to_floats(float (&to)[Count]) const {
    Scalar elements[Count];
    memcpy(elements, parts, BYTES);
#pragma unroll
    for (int i = 0; i < Count; ++i) to[i] = to_float(elements[i]);
  }
};

// What happens to columns before they are coded: nothing, or what a struct like this says.
struct AsTheyAre {
  __device__ __forceinline__ void prepare() {}  // called when the first loads are under way
  template <int Count> __device__ __forceinline__ void apply(float (&)[Count]) const {}
};

// Loads of InFlight heads are under way before the first of them, or the descale, is waited for.
template <class Scalar, int Count, int InFlight, class Change>
__device__ __forceinline__ void quantise_heads(const HeadColumns& columns, const HeadWalk& heads,
                                               Change change) {
  const bool shared = columns.from_stride == 0;
  float scale;
  Vector<Count> codes;
#pragma unroll 1
  for (int first = heads.first; first < heads.end; first += heads.step * InFlight) {
    const bool begins = first == heads.first;
    Elements<Scalar, Count> loaded[InFlight];
#pragma unroll
    for (int i = 0; i < InFlight; ++i) {
      const int head = first + heads.step * i;
      if (shared ? begins && i == 0 : head < heads.end) {
        loaded[i].load(columns.from + head * columns.from_stride);
      }
    }
    if (begins) {
      scale = 1.0f / __ldg(columns.descale);
      change.prepare();
    }
#pragma unroll
    for (int i = 0; i < InFlight; ++i) {
      const int head = first + heads.step * i;
      if (head >= heads.end) break;
      if (!shared || (begins && i == 0)) {
        float values[Count];
        loaded[i].to_floats(values);
        change.apply(values);
#pragma unroll
        for (int e = 0; e < Count; ++e) values[e] *= scale;
        codes = pack_fp8<E4M3, Count>(values);
      }
      store_once<Count>(columns.to + head * columns.to_stride, codes);
    }
  }
}
