// Rows of packed codes to numbers, Count values at a time: first load, then restore, so that many
// loads can be under way before the first value is needed.
#pragma once
#include "cache_format.cuh"

// Byte `Index` of `word`, a code plus Bias, as the code's value: in the mantissa of 2^23 an integer
// needs no conversion.
template <int Bias, int Index> __device__ __forceinline__ float integer_at(unsigned int word) {
  constexpr float ZERO = float((1 << 23) + Bias);
  return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7540u + Index)) - ZERO;
}

// Codes of Bits bits in two's complement, the first in the lowest bits, four bytes of them.
template <int Bits>
__device__ __forceinline__ void integers_from(unsigned int word, float (&to)[32 / Bits]) {
  if constexpr (Bits == 8) {
    const unsigned int biased = word ^ 0x80808080u;
    to[0] = integer_at<128, 0>(biased);
    to[1] = integer_at<128, 1>(biased);
    to[2] = integer_at<128, 2>(biased);
    to[3] = integer_at<128, 3>(biased);
  } else {
    const unsigned int biased = word ^ 0x88888888u;
    const unsigned int even = biased & 0x0f0f0f0fu, odd = biased >> 4 & 0x0f0f0f0fu;
    to[0] = integer_at<8, 0>(even);
    to[1] = integer_at<8, 0>(odd);
    to[2] = integer_at<8, 1>(even);
    to[3] = integer_at<8, 1>(odd);
    to[4] = integer_at<8, 2>(even);
    to[5] = integer_at<8, 2>(odd);
    to[6] = integer_at<8, 3>(even);
    to[7] = integer_at<8, 3>(odd);
  }
}

template <int Bits, int Count, int BYTES>
__device__ __forceinline__ void unpack_integers(const Vector<BYTES>& from, float (&to)[Count]) {
  constexpr int A_WORD = 32 / Bits;
  unsigned int words[(BYTES + 3) / 4] = {};
  memcpy(words, &from, BYTES);
#pragma unroll
  for (int i = 0; i < Count; i += A_WORD) {
    float values[A_WORD];
    integers_from<Bits>(words[i / A_WORD], values);
#pragma unroll
    for (int j = 0; j < A_WORD; ++j) {
      if (i + j < Count) to[i + j] = values[j];
    }
  }
}

// Where rows lie: in the cache, or copied to shared memory.
struct GlobalMemory {
  template <int BYTES> static __device__ __forceinline__ Vector<BYTES> load(const void* address) {
    return load_ahead<BYTES>(address);
  }
};
struct SharedMemory {
  template <int BYTES> static __device__ __forceinline__ Vector<BYTES> load(const void* address) {
    return *static_cast<const Vector<BYTES>*>(address);
  }
};

// Count values from `column` on of a row with Latent and Rope values. Count divides Latent, Rope
// and `column`, and is even where two codes share a byte. A row is read in accesses of ACCESS
// bytes, of which its address and, in fp8_ds_mla, its keys' offset must be multiples.
template <CacheFormat Format, int Latent, int Rope, int Count, class From = GlobalMemory>
struct RowReader {
  using Layout = RowLayout<Format, Latent, Rope>;
  static constexpr int VALUES = Latent + Rope;
  static constexpr int ACCESS = Count / Layout::CODES_A_BYTE;
  static constexpr bool HAS_TENSOR_SCALE = !Layout::TILED && !Layout::PER_TOKEN;
  static_assert(Latent % Count == 0 && Rope % Count == 0 && ACCESS > 0, "a piece is of one field");

  // Codes, or a key in bfloat16, and what they are multiplied by. Zeros are zeros.
  struct Piece {
    Vector<ACCESS> bits[Layout::TILED ? 2 : 1];
    float scale;
  };

  // `tensor_scale` is the descale of formats that have one for all rows.
  static __device__ __forceinline__ Piece load(const char* row, int column, float tensor_scale) {
    Piece piece = {};
    if constexpr (Layout::TILED) {
      if (column >= Latent) {
        const char* key = row + Layout::KEY + 2 * (column - Latent);
        piece.bits[0] = From::template load<ACCESS>(key);
        piece.bits[1] = From::template load<ACCESS>(key + ACCESS);
        return piece;
      }
    }
    piece.bits[0] = From::template load<ACCESS>(row + column / Layout::CODES_A_BYTE);
    if constexpr (HAS_TENSOR_SCALE) {
      piece.scale = tensor_scale;
    } else {
      const int scale = Layout::TILED ? column / DS_MLA_TILE : column >= Latent;
      piece.scale = __uint_as_float(From::template load<4>(row + Layout::SCALES + 4 * scale));
    }
    return piece;
  }

  // The values of a piece loaded from `column`: each code times its scale, one float product.
  static __device__ __forceinline__ void restore(const Piece& piece, int column,
                                                 float (&to)[Count]) {
    if constexpr (Layout::TILED) {
      if (column >= Latent) {
        __nv_bfloat16 key[Count];
        memcpy(key, piece.bits, sizeof(key));
#pragma unroll
        for (int i = 0; i < Count; ++i) to[i] = to_float(key[i]);
        return;
      }
    }
    if constexpr (Layout::PER_TOKEN) {
      unpack_integers<8 / Layout::CODES_A_BYTE, Count, ACCESS>(piece.bits[0], to);
    } else {
      unpack_fp8<fp8_kind(Format), Count>(piece.bits[0], to);
    }
#pragma unroll
    for (int i = 0; i < Count; ++i) to[i] *= piece.scale;
  }
};
