// A team of threads writes one packed row of the cache, each thread a few pieces of 8 values.
#pragma once
#include "cache_write.cuh"
#include "rope.cuh"

// The greatest power of two that divides `number`, at most `most`.
constexpr int power_in(int number, int most) {
  return most > 1 && number % most != 0 ? power_in(number, most / 2) : most;
}

constexpr int least(int a, int b) { return a < b ? a : b; }

// Values of one piece of a row, loaded in accesses of Access bytes.
template <class Scalar, int Access> struct RowPiece {
  Vector<Access> parts[8 * sizeof(Scalar) / Access];

  template <int Count> __device__ __forceinline__ void load(const char* from) {
#pragma unroll
    for (int i = 0; i < Count * int(sizeof(Scalar)) / Access; ++i) {
      parts[i] = load_once<Access>(from + i * Access);
    }
  }

  template <int Count> __device__ __forceinline__ void floats(float (&to)[Count]) const {
    Scalar values[Count];
    memcpy(values, parts, sizeof(values));
#pragma unroll
    for (int i = 0; i < Count; ++i) to[i] = to_float(values[i]);
  }
};

// Stores a piece in accesses of Access bytes, or at once if it is smaller.
template <int Access, class Piece> __device__ __forceinline__ void store_row(char* to, Piece piece) {
  constexpr int STEP = least(Access, sizeof(Piece));
#pragma unroll
  for (int i = 0; i < int(sizeof(Piece)); i += STEP) {
    Vector<STEP> part;
    memcpy(&part, reinterpret_cast<const char*>(&piece) + i, STEP);
    store_once<STEP>(to + i, part);
  }
}

// The largest magnitude of `Lanes` neighbouring threads, all of which take part.
template <int Lanes> __device__ __forceinline__ unsigned int largest_of(unsigned int mine) {
  const unsigned int lanes =
      Lanes == 32 ? 0xffffffffu : ((1u << Lanes % 32) - 1u) << (threadIdx.x & 31 & -Lanes);
#pragma unroll
  for (int step = Lanes / 2; step > 0; step /= 2) {
    mine = max(mine, __shfl_xor_sync(lanes, mine, step));
  }
  return mine;
}

// `Threads` threads, whole warps, write one row: first each loads its pieces, which takes no more
// than the addresses, then they find the scales together and store. Formats with a scale a token
// are written by the first warp alone. Latent and key have even widths.
template <class Scalar, CacheFormat Format, bool Pow2, int Latent, int Rope, int Access,
          int CacheAccess, int TableAccess, int Threads>
struct PackedRow {
  using Layout = RowLayout<Format, Latent, Rope>;
  static constexpr int TEAM = scaled_per_token(Format) ? 32 : Threads;
  static constexpr int LATENT_PIECE = power_in(Latent, 8);  // values of a piece
  static constexpr int KEY_PIECE = power_in(Rope, 8);
  static constexpr int LATENT_STEP = LATENT_PIECE / Layout::CODES_A_BYTE;  // of a piece in the row
  static constexpr int KEY_STEP = Layout::TILED ? 2 * KEY_PIECE : KEY_PIECE / Layout::CODES_A_BYTE;
  static constexpr int LATENTS = Latent / LATENT_PIECE;
  static constexpr int ITEMS = LATENTS + Rope / KEY_PIECE;
  static constexpr int PIECES = (ITEMS + TEAM - 1) / TEAM;
  static constexpr int KEY_ACCESS = least(CacheAccess, power_in(Layout::KEY, 16));
  static_assert(Threads % 32 == 0 && LATENT_PIECE > 1 && KEY_PIECE > 1, "whole warps, whole pairs");

  RowPiece<Scalar, Access> pieces[PIECES];

  __device__ __forceinline__ void load(const char* kv_c, const char* k_pe, int thread) {
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
      const int item = thread + TEAM * i;
      if (item < LATENTS) {
        pieces[i].template load<LATENT_PIECE>(kv_c + item * (LATENT_PIECE * int(sizeof(Scalar))));
      } else if (item < ITEMS && thread < TEAM) {
        pieces[i].template load<KEY_PIECE>(k_pe + (item - LATENTS) * (KEY_PIECE * int(sizeof(Scalar))));
      }
    }
  }

  __device__ __forceinline__ void store(char* row, const RopeTable& table, long long position,
                                        const float* k_scale, int thread) const {
    if (thread >= TEAM) return;
    float latent_scale = 1.0f, key_scale = 1.0f;
    if constexpr (scaled_per_token(Format)) {
      scales_of_token(row, table, position, thread, latent_scale, key_scale);
    } else if constexpr (Format != FP8_DS_MLA) {
      latent_scale = key_scale = __ldg(k_scale);
    }
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
      const int item = thread + TEAM * i;
      if (item < LATENTS) {
        float values[LATENT_PIECE];
        pieces[i].floats(values);
        if constexpr (Format == FP8_DS_MLA) {
          latent_scale = scale_of<Format, Pow2>(largest_of<DS_MLA_TILE / LATENT_PIECE>(largest(values)));
          if (item % (DS_MLA_TILE / LATENT_PIECE) == 0) {
            float* scales = reinterpret_cast<float*>(row + Layout::SCALES);
            __stcs(scales + item / (DS_MLA_TILE / LATENT_PIECE), latent_scale);
          }
        }
        store_row<CacheAccess>(row + item * LATENT_STEP,
                               codes_of<Format, Pow2>(values, latent_scale));
      } else if (item < ITEMS) {
        const int piece = item - LATENTS;
        float values[KEY_PIECE];
        key_values(i, piece, table, position, values);
        char* to = row + Layout::KEY + piece * KEY_STEP;
        if constexpr (Format == FP8_DS_MLA) {
          store_row<KEY_ACCESS>(to, pack<__nv_bfloat16, 2 * KEY_PIECE>(values));
        } else {
          store_row<KEY_ACCESS>(to, codes_of<Format, Pow2>(values, key_scale));
        }
      }
    }
  }

 private:
  template <int Count>
  static __device__ __forceinline__ unsigned int largest(const float (&values)[Count]) {
    unsigned int amax = 0;
#pragma unroll
    for (int i = 0; i < Count; ++i) amax = max(amax, magnitude<Format>(values[i]));
    return amax;
  }

  __device__ __forceinline__ void key_values(int i, int piece, const RopeTable& table,
                                             long long position, float (&values)[KEY_PIECE]) const {
    pieces[i].floats(values);
    if (table.rows == nullptr) return;
    const auto angles = angles_at<KEY_PIECE / 2, least(TableAccess, 2 * KEY_PIECE)>(table, position, Rope / 2,
                                                                        piece * (KEY_PIECE / 2));
#pragma unroll
    for (int pair = 0; pair < KEY_PIECE / 2; ++pair) {
      rotate_pair(values[2 * pair], values[2 * pair + 1], angles.cosine[pair], angles.sine[pair]);
    }
  }

  __device__ __forceinline__ void scales_of_token(char* row, const RopeTable& table,
                                                  long long position, int lane,
                                                  float& latent_scale, float& key_scale) const {
    unsigned int latent = 0, key = 0;
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
      const int item = lane + TEAM * i;
      if (item < LATENTS) {
        float values[LATENT_PIECE];
        pieces[i].floats(values);
        latent = max(latent, largest(values));
      } else if (item < ITEMS) {
        float values[KEY_PIECE];
        key_values(i, item - LATENTS, table, position, values);
        key = max(key, largest(values));
      }
    }
    latent_scale = scale_of<Format, Pow2>(largest_of<32>(latent));
    key_scale = scale_of<Format, Pow2>(largest_of<32>(key));
    if (lane == 0) {
      float* scales = reinterpret_cast<float*>(row + Layout::SCALES);
      __stcs(scales, latent_scale);
      __stcs(scales + 1, key_scale);
    }
  }
};
