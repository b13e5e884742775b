// Byte layouts of one cache row, as sandbox/cache_formats describes them.
#pragma once
#include "fp8.cuh"

enum CacheFormat { PLAIN, FP8_E4M3, FP8_E5M2, FP8_DS_MLA, INT8_PER_TOKEN, INT4_PER_TOKEN };

constexpr int DS_MLA_TILE = 128;

// Offsets in bytes of the fields of a packed row with Latent and Rope values.
template <CacheFormat Format, int Latent, int Rope> struct RowLayout {
  static constexpr bool TILED = Format == FP8_DS_MLA;
  static constexpr bool PER_TOKEN = Format == INT8_PER_TOKEN || Format == INT4_PER_TOKEN;
  static constexpr int CODES_A_BYTE = Format == INT4_PER_TOKEN ? 2 : 1;
  static constexpr int LATENT_BYTES = Latent / CODES_A_BYTE;
  static constexpr int KEY_BYTES = TILED ? 2 * Rope : Rope / CODES_A_BYTE;
  static constexpr int SCALES = TILED ? LATENT_BYTES : LATENT_BYTES + KEY_BYTES;
  static constexpr int SCALE_COUNT = TILED ? Latent / DS_MLA_TILE : PER_TOKEN ? 2 : 0;
  static constexpr int KEY = TILED ? SCALES + 4 * SCALE_COUNT : LATENT_BYTES;
  static constexpr int BYTES = LATENT_BYTES + KEY_BYTES + 4 * SCALE_COUNT;
};

constexpr Fp8Kind fp8_kind(CacheFormat format) { return format == FP8_E5M2 ? E5M2 : E4M3; }
