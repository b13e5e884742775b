// Tiles of 16-bit rows in shared memory: how rows get there and how mma fragments come out.
//
// A tile is made of panels of 64 columns, 128 bytes a row. Chunk c of a panel's row r, 16 bytes,
// stands at place c ^ r % 8 of the row, so that the same chunk of 8 rows lies in 8 different groups
// of banks.
#pragma once
#include "fp8.cuh"
#include "mma.cuh"

constexpr int PANEL_BYTES = 128;
constexpr int CHUNK_BYTES = 16;
constexpr int PANEL_CHUNKS = PANEL_BYTES / CHUNK_BYTES;

// What tensor cores multiply for an element: itself, or the half that holds a code exactly.
template <class Element> struct MultipliedAs { using type = Element; };
template <> struct MultipliedAs<unsigned char> { using type = __half; };

// Columns is a multiple of 8; a tile has zeros up to the next multiple of 16.
template <int Rows, int Columns> struct Tile {
  static constexpr int PADDED = (Columns + 15) / 16 * 16;
  static constexpr int PANELS = (PADDED + 63) / 64;
  static constexpr int BYTES = PANELS * Rows * PANEL_BYTES;

  static __device__ __forceinline__ int chunk(int row, int column_chunk) {
    return (column_chunk / PANEL_CHUNKS * Rows + row) * PANEL_BYTES +
           ((column_chunk ^ row) & (PANEL_CHUNKS - 1)) * CHUNK_BYTES;
  }

  // Where a lane with this place reads in the 16 rows and 16 columns that start at multiples of 16.
  static __device__ __forceinline__ const char* block(const char* tile, int place, int row_block,
                                                      int column_block) {
    const char* const lane = tile + (place ^ (column_block % 4 * 2 * CHUNK_BYTES));
    return lane + (column_block / 4 * Rows + row_block * 16) * PANEL_BYTES;
  }
};

// In which order ldmatrix takes the four quarters of 16 x 16 elements: the lower left before the
// upper right, as mma wants A, and a transposed B; or the upper right first, as it wants B.
enum Quarters { DOWN_FIRST, RIGHT_FIRST };

template <Quarters order> __device__ __forceinline__ int lane_place() {
  const int lane = threadIdx.x % 32, inner = lane / 8 % 2, outer = lane / 16;
  const int row = lane % 8 + (order == DOWN_FIRST ? inner : outer) * 8;
  const int right = order == DOWN_FIRST ? outer : inner;
  return row * PANEL_BYTES + ((right ^ row) & (PANEL_CHUNKS - 1)) * CHUNK_BYTES;
}

__device__ __forceinline__ unsigned int halves_from_codes(unsigned int codes) {
#if FP8_INSTRUCTIONS
  unsigned int halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((unsigned short)codes));
  return halves;
#else
  const float2 pair = floats_from_fp8<E4M3>((unsigned short)codes);
  const __half2 halves = __floats2half2_rn(pair.x, pair.y);
  unsigned int bits;
  memcpy(&bits, &halves, sizeof(bits));
  return bits;
#endif
}

// Rows from global memory to a tile by all threads. A thread has a piece of 16 bytes of every
// panel, of every STEP-th row. `begin` starts asynchronous copies, which `finish` ends once they
// have been waited for. `own` is the thread's place in the first row; rows from `count` on become
// zero.
template <class Element, int Height, int Columns, int Threads> struct TileCopy {
  using Into = Tile<Height, Columns>;
  static constexpr bool CODES = sizeof(Element) == 1;
  static constexpr int LANES = CODES ? PANEL_CHUNKS / 2 : PANEL_CHUNKS;
  static constexpr int STEP = Threads / LANES;
  static constexpr int PASSES = (Height + STEP - 1) / STEP;
  static constexpr int PIECE = CHUNK_BYTES / int(sizeof(Element));
  // Codes wait in a place of their thread's own until they have become halves.
  static constexpr int WAITING_BYTES = CODES ? PASSES * Into::PANELS * Threads * CHUNK_BYTES : 0;
  static_assert(STEP % 8 == 0, "a thread's rows are swizzled alike");

  static __device__ __forceinline__ const char* own(const char* first, long long stride) {
    return first + threadIdx.x / LANES * stride + threadIdx.x % LANES * CHUNK_BYTES;
  }

  static __device__ __forceinline__ void begin(char* tile, char* waiting, const char* own,
                                               long long stride, int count) {
    each(own, stride, count, [&](int pass, int panel, const char* from, int bytes) {
      cp_async<CHUNK_BYTES>(CODES ? waiting_place(waiting, pass, panel) : place(tile, pass, panel),
                            from, bytes);
    });
  }

  static __device__ __forceinline__ void finish(char* tile, const char* waiting) {
    if constexpr (CODES) {
      each(nullptr, 0, 0, [&](int pass, int panel, const char*, int) {
        store_halves(place(tile, pass, panel), *reinterpret_cast<const uint4*>(
                                                    waiting_place(waiting, pass, panel)));
      });
    }
  }

  // Codes that have nowhere to wait.
  static __device__ __forceinline__ void at_once(char* tile, const char* own, long long stride,
                                                 int count) {
    each(own, stride, count, [&](int pass, int panel, const char* from, int bytes) {
      uint4 codes = make_uint4(0, 0, 0, 0);
      if (bytes > 0) codes = __ldg(reinterpret_cast<const uint4*>(from));
      store_halves(place(tile, pass, panel), codes);
    });
  }

 private:
  template <class Visit>
  static __device__ __forceinline__ void each(const char* own, long long stride, int count,
                                              const Visit& visit) {
    const int first = threadIdx.x / LANES, left = count - first;
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
#pragma unroll
      for (int panel = 0; panel < Into::PANELS; ++panel) {
        const int column = (panel * LANES + int(threadIdx.x % LANES)) * PIECE;
        if (column < Into::PADDED && (Height % STEP == 0 || first < Height - pass * STEP)) {
          visit(pass, panel, own + pass * STEP * stride + panel * LANES * CHUNK_BYTES,
                pass * STEP < left && column < Columns ? CHUNK_BYTES : 0);
        }
      }
    }
  }

  static __device__ __forceinline__ char* place(char* tile, int pass, int panel) {
    const int chunk = threadIdx.x % LANES * (CODES ? 2 : 1);
    char* const first = tile + Into::chunk(threadIdx.x / LANES, chunk);
    return first + (panel * Height + pass * STEP) * PANEL_BYTES;
  }
  template <class Byte>
  static __device__ __forceinline__ Byte* waiting_place(Byte* waiting, int pass, int panel) {
    return waiting + threadIdx.x * CHUNK_BYTES +
           (pass * Into::PANELS + panel) * Threads * CHUNK_BYTES;
  }

  // Two chunks side by side: the second stands before the first in odd rows.
  static __device__ __forceinline__ void store_halves(char* first, const uint4& codes) {
    const bool odd = threadIdx.x / LANES % 2 != 0;
    *reinterpret_cast<uint4*>(first) = halves(codes.x, codes.y);
    *reinterpret_cast<uint4*>(odd ? first - CHUNK_BYTES : first + CHUNK_BYTES) =
        halves(codes.z, codes.w);
  }
  static __device__ __forceinline__ uint4 halves(unsigned int low, unsigned int high) {
    return make_uint4(halves_from_codes(low & 0xffffu), halves_from_codes(low >> 16),
                      halves_from_codes(high & 0xffffu), halves_from_codes(high >> 16));
  }
};
