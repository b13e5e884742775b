// A team of threads writes one packed row of the cache, each thread a few pieces of 8 values.
#pragma once
#include "cache_write.cuh"
#include "rope.cuh"

// The greatest power of two that divides `number`, at most `most`.
constexpr int power_in(int number, int most) {
  return most > 1 && number % most != 0 ? power_in(number, most / 2) : most;
}

constexpr int least(int a, int b) { return a < b ? a : b; }

// Count values, as they were loaded in accesses of Access bytes.
template <class Scalar, int Count, int Access> struct RowPiece {
  static constexpr int BYTES = Count * int(sizeof(Scalar));
  Vector<Access> parts[BYTES / Access];

  __device__ __forceinline__ void load(const char* from) {
#pragma unroll
    for (int i = 0; i < BYTES / Access; ++i) parts[i] = load_once<Access>(from + i * Access);
  }

  __device__ __forceinline__ void to_floats(float (&to)[Count]) const {
    Scalar values[Count];
    memcpy(values, parts, BYTES);
#pragma unroll
    for (int i = 0; i < Count; ++i) to[i] = to_float(values[i]);
  }
};

// Stores a piece in accesses of Access bytes, or at once if it is smaller.
template <int Access, class Piece>
__device__ __forceinline__ void store_by(char* to, const Piece& piece) {
  constexpr int STEP = least(Access, sizeof(Piece));
#pragma unroll
  for (int i = 0; i < int(sizeof(Piece)); i += STEP) {
    Vector<STEP> part;
    memcpy(&part, reinterpret_cast<const char*>(&piece) + i, STEP);
    store_once<STEP>(to + i, part);
  }
}

// The greatest number of `Lanes` neighbouring threads; the whole warp takes part.
template <int Lanes> __device__ __forceinline__ unsigned int greatest_of(unsigned int mine) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  if constexpr (Lanes == 32) return __reduce_max_sync(0xffffffffu, mine);
#endif
#pragma unroll
  for (int step = Lanes / 2; step > 0; step /= 2) {
    mine = max(mine, __shfl_xor_sync(0xffffffffu, mine, step));
  }
  return mine;
}

template <class Magnitude, int Count>
__device__ __forceinline__ unsigned int greatest(const float (&values)[Count], Magnitude of) {
  unsigned int most = 0;
#pragma unroll
  for (int i = 0; i < Count; ++i) most = max(most, of(values[i]));
  return most;
}

// A team of `Threads` threads, whole warps, writes one row: first each loads its pieces and the
// angles, for which no more is needed than the addresses, then they agree on the scales and store.
// Where a scale is that of a whole latent or key, the team is its first warp. Widths are even.
template <class Scalar, CacheFormat Format, bool Pow2, int Latent, int Rope, int Access,
          int CacheAccess, int TableAccess, int Threads>
class PackedRow {
  using Layout = RowLayout<Format, Latent, Rope>;
  static constexpr bool PER_TOKEN = scaled_per_token(Format);
  static constexpr bool PER_TENSOR = !PER_TOKEN && Format != FP8_DS_MLA;
  static constexpr int WORKERS = PER_TOKEN ? 32 : Threads;
  static constexpr int WIDTH = power_in(Latent, 8);  // values of a piece
  static constexpr int KEY_WIDTH = power_in(Rope, 8);
  static constexpr int LATENTS = Latent / WIDTH;  // pieces of the row
  static constexpr int KEYS = Rope / KEY_WIDTH;
  static constexpr int MINE = (LATENTS + WORKERS - 1) / WORKERS;  // pieces of a thread, at most
  static constexpr int MY_KEYS = KEYS > 0 ? (KEYS + WORKERS - 1) / WORKERS : 1;
  static constexpr int KEY_ACCESS = least(CacheAccess, power_in(Layout::KEY, 16));
  static_assert(Threads % 32 == 0 && WIDTH > 1 && KEY_WIDTH > 1, "whole warps, whole pairs");

  using Code = Coder<Format, Pow2>;
  using Turn = Angles<KEY_WIDTH / 2>;

  RowPiece<Scalar, WIDTH, Access> latents[MINE] = {};
  RowPiece<Scalar, KEY_WIDTH, Access> keys[MY_KEYS] = {};
  Turn angles[MY_KEYS];
  float tensor_scale;
  bool rotated;
  int thread;

 public:
  __device__ __forceinline__ void load(const char* kv_c, const char* k_pe, const RopeTable& table,
                                       long long position, const float* k_scale, int which) {
    thread = which;
    rotated = table.rows != nullptr;
    if (PER_TOKEN && thread >= WORKERS) return;
    if constexpr (PER_TENSOR) tensor_scale = __ldg(k_scale);
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
      if (piece(i) < LATENTS) latents[i].load(kv_c + piece(i) * latents[i].BYTES);
    }
#pragma unroll
    for (int i = 0; i < MY_KEYS; ++i) {
      if (key(i) < KEYS) keys[i].load(k_pe + key(i) * keys[i].BYTES);
    }
#pragma unroll
    for (int i = 0; i < MY_KEYS; ++i) {
      if (rotated && key(i) < KEYS) {
        angles[i] = angles_at<KEY_WIDTH / 2, least(TableAccess, 2 * KEY_WIDTH)>(
            table, position, Rope / 2, key(i) * (KEY_WIDTH / 2));
      }
    }
  }

  __device__ __forceinline__ void store(char* row) const {
    if (PER_TOKEN && thread >= WORKERS) return;
    float* scales = reinterpret_cast<float*>(row + Layout::SCALES);
    float values[MINE][WIDTH], key_values[MY_KEYS][KEY_WIDTH];
#pragma unroll
    for (int i = 0; i < MINE; ++i) latents[i].to_floats(values[i]);
#pragma unroll
    for (int i = 0; i < MY_KEYS; ++i) turn(i, key_values[i]);
    if constexpr (PER_TOKEN) {
      unsigned int amax = 0, key_amax = 0;
#pragma unroll
      for (int i = 0; i < MINE; ++i) {
        if (piece(i) < LATENTS) amax = max(amax, greatest(values[i], magnitude));
      }
#pragma unroll
      for (int i = 0; i < MY_KEYS; ++i) {
        if (key(i) < KEYS) key_amax = max(key_amax, greatest(key_values[i], magnitude));
      }
      const Code code(scale_of<Format, Pow2>(greatest_of<32>(amax)));
      const Code key_code(scale_of<Format, Pow2>(greatest_of<32>(key_amax)));
      if (thread == 0) {
        __stcs(scales, code.scale);
        __stcs(scales + 1, key_code.scale);
      }
      store_latents(row, values, code);
      store_keys(row, key_values, key_code);
    } else if constexpr (PER_TENSOR) {
      const Code code(tensor_scale);
      store_latents(row, values, code);
      store_keys(row, key_values, code);
    } else {
      store_tiles(row, scales, values);
      store_keys(row, key_values, [](const float(&from)[KEY_WIDTH]) {
        return pack<__nv_bfloat16, 2 * KEY_WIDTH>(from);
      });
    }
  }

 private:
  __device__ __forceinline__ int piece(int i) const { return thread + WORKERS * i; }

  // Keys begin where the latents leave threads with less to do.
  __device__ __forceinline__ int key(int i) const {
    return (thread + WORKERS - LATENTS % WORKERS) % WORKERS + WORKERS * i;
  }

  __device__ __forceinline__ void turn(int i, float (&to)[KEY_WIDTH]) const {
    keys[i].to_floats(to);
    if (rotated) rotate_pairs(to, angles[i]);
  }

  __device__ __forceinline__ void store_latents(char* row, const float (&values)[MINE][WIDTH],
                                                const Code& code) const {
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
      const auto codes = code(values[i]);
      if (piece(i) < LATENTS) store_by<CacheAccess>(row + piece(i) * int(sizeof(codes)), codes);
    }
  }

  template <class Encode>
  __device__ __forceinline__ void store_keys(char* row,
                                             const float (&values)[MY_KEYS][KEY_WIDTH],
                                             const Encode& encode) const {
#pragma unroll
    for (int i = 0; i < MY_KEYS; ++i) {
      if (key(i) < KEYS) {
        const auto bits = encode(values[i]);
        store_by<KEY_ACCESS>(row + Layout::KEY + key(i) * int(sizeof(bits)), bits);
      }
    }
  }

  __device__ __forceinline__ void store_tiles(char* row, float* scales,
                                              const float (&values)[MINE][WIDTH]) const {
    constexpr int LANES = DS_MLA_TILE / WIDTH;
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
      unsigned int amax = greatest_of<LANES>(greatest(values[i], magnitude));
      if (__any_sync(0xffffffffu, amax >= INFINITE)) {
        amax = greatest_of<LANES>(greatest(values[i], finite_magnitude));
      }
      if (piece(i) >= LATENTS) continue;
      const Code code(scale_of<Format, Pow2>(amax));
      if (piece(i) % LANES == 0) __stcs(scales + piece(i) / LANES, code.scale);
      store_by<CacheAccess>(row + piece(i) * WIDTH, code(values[i]));
    }
  }
};
