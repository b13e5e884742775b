// Heads of a token as E4M3 codes of value * (1 / descale).
//
// A thread stays at its Count columns while it walks over the heads, so that nothing is divided and
// what all heads share is read once.
#pragma once
#include "fp8.cuh"

// A thread's columns of the first head, and bytes from head to head.
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

// Calls visit(item, walk) for the thread's items, of Left + Right that each head has. The block
// takes as many heads at a time as it has threads for. Neighbouring threads have neighbouring
// items, first those on the left of all these heads, then those on the right, so that most warps
// have work of one kind.
template <int Left, int Right, int Threads, class Visit>
__device__ __forceinline__ void walk_items(int heads, const Visit& visit) {
  constexpr int ITEMS = Left + Right;
  const int thread = threadIdx.x;
  if constexpr (ITEMS > Threads) {
#pragma unroll 1
    for (int item = thread; item < ITEMS; item += Threads) visit(item, HeadWalk{0, 1, heads});
  } else {
    constexpr int STEP = Threads / ITEMS;
    constexpr int LEFT = STEP * Left;
    constexpr int RIGHT = Right > 0 ? Right : 1;
    if (thread >= STEP * ITEMS) return;  // the rest would take heads a second time
    const bool right = thread >= LEFT;
    const int item = right ? Left + (thread - LEFT) % RIGHT : thread % Left;
    visit(item, HeadWalk{right ? (thread - LEFT) / RIGHT : thread / Left, STEP, heads});
  }
}

template <class Scalar> constexpr bool IS_BF16 = false;
template <> constexpr bool IS_BF16<__nv_bfloat16> = true;

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
    if constexpr (IS_BF16<Scalar> && Count > 1) {  // the upper bits of a float: an instruction each
      unsigned int pairs[Count / 2];
      memcpy(pairs, parts, BYTES);
#pragma unroll
      for (int i = 0; i < Count / 2; ++i) {
        to[2 * i] = __uint_as_float(pairs[i] << 16);
        to[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
      }
    } else {
      Scalar elements[Count];
      memcpy(elements, parts, BYTES);
#pragma unroll
      for (int i = 0; i < Count; ++i) to[i] = to_float(elements[i]);
    }
  }
};

// What else happens on a walk: nothing, or what a struct with these functions does.
struct Plainly {
  __device__ __forceinline__ void prepare() {}  // once, while the first loads are under way
  template <int Count> __device__ __forceinline__ void change(float (&)[Count]) const {}
  __device__ __forceinline__ void pass() {}  // after each head of the thread
};

// Loads of InFlight heads are under way before the first of them, or the descale, is waited for. A
// thread without columns of its own walks along all the same.
template <class Scalar, int Count, int InFlight, class Along>
__device__ __forceinline__ void quantize_heads(const HeadColumns& columns, const HeadWalk& heads,
                                               Along along, bool has_columns = true) {
  const long long from_step = heads.step * columns.from_stride;
  const long long to_step = heads.step * columns.to_stride;
  const char* from = columns.from + heads.first * columns.from_stride;
  char* to = columns.to + heads.first * columns.to_stride;
  float reciprocal;
#pragma unroll 1
  for (int first = heads.first; first < heads.end; first += heads.step * InFlight) {
    Elements<Scalar, Count> loaded[InFlight];
#pragma unroll
    for (int i = 0; i < InFlight; ++i) {
      if (has_columns && first + heads.step * i < heads.end) loaded[i].load(from);
      from += from_step;
    }
    if (first == heads.first) {
      reciprocal = 1.0f / __ldg(columns.descale);
      along.prepare();
    }
#pragma unroll
    for (int i = 0; i < InFlight; ++i) {
      if (first + heads.step * i >= heads.end) break;
      if (has_columns) {
        float values[Count];
        loaded[i].to_floats(values);
        along.change(values);
        store_once<Count>(to, head_codes(values, reciprocal));
      }
      along.pass();
      to += to_step;
    }
  }
}

// Codes of a thread's columns that all heads have in common, stored for each head it passes.
template <int Count> struct SharedCodes : Plainly {
  const bool exist;
  Vector<Count> codes;
  char* to;
  long long step;

  // `along` says what changes the values, as on a walk.
  template <class Scalar, class Along>
  static __device__ __forceinline__ SharedCodes of(const HeadColumns& columns,
                                                   const HeadWalk& heads, bool exist,
                                                   Along along) {
    SharedCodes shared = {{}, exist, {}, columns.to + heads.first * columns.to_stride,
                          heads.step * columns.to_stride};
    if (exist) {
      Elements<Scalar, Count> loaded;
      loaded.load(columns.from);
      along.prepare();
      float values[Count];
      loaded.to_floats(values);
      along.change(values);
      shared.codes = head_codes(values, 1.0f / __ldg(columns.descale));
    }
    return shared;
  }

  __device__ __forceinline__ void pass() {
    if (exist) store_once<Count>(to, codes);
    to += step;
  }
};
