// One output row [left | right] by elements of the left part and pairs of the right one: item i is
// element i of the left part, or pair i - width of the right one.
#pragma once
#include "cache_row.cuh"

template <class Scalar> __device__ __forceinline__ Scalar* at(Scalar* base, long long bytes) {
  return reinterpret_cast<Scalar*>((char*)base + bytes);
}
template <class Scalar>
__device__ __forceinline__ const Scalar* at(const Scalar* base, long long bytes) {
  return reinterpret_cast<const Scalar*>((const char*)base + bytes);
}

// Pair `pair` of `from`, turned by the angles of a position.
template <class Scalar>
__device__ __forceinline__ float2 pair_at(const Scalar* from, int pair, const RopeTable& table,
                                          long long position, int half) {
  float2 values = make_float2(to_float(from[2 * pair]), to_float(from[2 * pair + 1]));
  if (table.rows != nullptr) {
    const Angles<1> angles = angles_at<1, 4>(table, position, half, pair);
    rotate_pair(values.x, values.y, angles.cosine[0], angles.sine[0]);
  }
  return values;
}

template <class Scalar> struct ElementRow {
  const Scalar* left;
  const Scalar* right;
  int width;  // elements of the left part

  // In the elements' own type; what is not rotated keeps its bits.
  __device__ __forceinline__ void write(Scalar* to, int item, const RopeTable& table,
                                        long long position, int half) const {
    if (item < width) {
      to[item] = left[item];
      return;
    }
    const int pair = item - width;
    Scalar even = right[2 * pair], odd = right[2 * pair + 1];
    if (table.rows != nullptr) {
      const float2 turned = pair_at(right, pair, table, position, half);
      even = from_float<Scalar>(turned.x);
      odd = from_float<Scalar>(turned.y);
    }
    to[width + 2 * pair] = even;
    to[width + 2 * pair + 1] = odd;
  }

  // As codes: `code(value)` is a byte.
  template <class Code>
  __device__ __forceinline__ void write_codes(unsigned char* to, int item, const RopeTable& table,
                                              long long position, int half, Code code) const {
    if (item < width) {
      to[item] = code(to_float(left[item]));
      return;
    }
    const int pair = item - width;
    const float2 values = pair_at(right, pair, table, position, half);
    to[width + 2 * pair] = code(values.x);
    to[width + 2 * pair + 1] = code(values.y);
  }
};

// The E4M3 code of a head's value: times the reciprocal of the descale.
struct HeadCode {
  float reciprocal;
  __device__ __forceinline__ explicit HeadCode(const float* descale)
      : reciprocal(1.0f / __ldg(descale)) {}
  __device__ __forceinline__ unsigned char operator()(float value) const {
    const float values[1] = {value};
    return head_codes(values, reciprocal);
  }
};

// One thread codes all pairs that share a scale, and stores the scale.
template <CacheFormat Format, bool Pow2, class Pair>
__device__ __forceinline__ void write_group(int pairs, const Pair& pair, char* codes,
                                            char* scale_at) {
  constexpr int STEP = 2 / codes_a_byte(Format);
  constexpr auto of = Format == FP8_DS_MLA ? finite_magnitude : magnitude;
  unsigned int amax = 0;
  for (int i = 0; i < pairs; ++i) {
    const float2 values = pair(i);
    amax = max(amax, max(of(values.x), of(values.y)));
  }
  const Coder<Format, Pow2> coder(scale_of<Format, Pow2>(amax));
  *reinterpret_cast<float*>(scale_at) = coder.scale;
  for (int i = 0; i < pairs; ++i) {
    const float2 both = pair(i);
    const float values[2] = {both.x, both.y};
    const auto code = coder(values);
    memcpy(codes + i * STEP, &code, STEP);
  }
}

// Item i of Latent + Rope / 2 of a token's cache row: an element or a pair; in formats with scales
// of their own all values that share one, and nothing for the items that are left over.
template <class Scalar, CacheFormat Format, bool Pow2, int Latent, int Rope>
__device__ __forceinline__ void insert_item(int item, const Scalar* kv_c, const Scalar* k_pe,
                                            const RopeTable& table, long long position, char* row,
                                            const float* k_scale) {
  using Layout = RowLayout<Format, Latent, Rope>;
  constexpr int HALF = Rope / 2;
  const ElementRow<Scalar> source = {kv_c, k_pe, Latent};
  const auto key = [&](int pair) { return pair_at(k_pe, pair, table, position, HALF); };
  if constexpr (Format == PLAIN) {
    source.write(reinterpret_cast<Scalar*>(row), item, table, position, HALF);
  } else if constexpr (Format == FP8_E4M3 || Format == FP8_E5M2) {
    const Coder<Format, Pow2> coder(__ldg(k_scale));
    const auto code = [&](float value) {
      const float values[1] = {value};
      return coder(values);
    };
    source.write_codes(reinterpret_cast<unsigned char*>(row), item, table, position, HALF, code);
  } else {
    constexpr int GROUPS = Layout::TILED ? Layout::SCALE_COUNT : 1;
    constexpr int GROUP = Latent / GROUPS;
    if (item < GROUPS) {
      const auto latent = [&](int pair) {
        const Scalar* values = kv_c + item * GROUP + 2 * pair;
        return make_float2(to_float(values[0]), to_float(values[1]));
      };
      write_group<Format, Pow2>(GROUP / 2, latent,
                                row + item * (GROUP / Layout::CODES_A_BYTE),
                                row + Layout::SCALES + 4 * item);
    } else if constexpr (Layout::TILED) {
      const int pair = item - GROUPS;
      if (pair >= HALF) return;
      const float2 values = key(pair);
      auto* to = reinterpret_cast<__nv_bfloat16*>(row + Layout::KEY) + 2 * pair;
      to[0] = from_float<__nv_bfloat16>(values.x);
      to[1] = from_float<__nv_bfloat16>(values.y);
    } else if (item == GROUPS) {
      write_group<Format, Pow2>(HALF, key, row + Layout::KEY, row + Layout::SCALES + 4);
    }
  }
}
