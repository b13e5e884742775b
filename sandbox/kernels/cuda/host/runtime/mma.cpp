// Tensor-core instructions. Fragments are laid out over the lanes as the PTX ISA documents, with
// `group` = lane / 4 and `place` = lane % 4.
#include <cstring>

#include "checker.h"
#include "worker.h"

namespace {

float from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

float from_half(uint16_t bits) {
  const uint32_t sign = uint32_t(bits & 0x8000) << 16, rest = bits & 0x7fff;
  if (rest >= 0x7c00) return from_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  if (rest >= 0x0400) return from_bits(sign | ((rest << 13) + (112u << 23)));
  const float subnormal = float(rest) * 0x1p-24f;
  return sign ? -subnormal : subnormal;
}

struct Mma {
  SandboxOperand type;
  int k;
  float* d;
  const unsigned *a, *b;
  const float* c;
};

// Element `half` of a register that packs two, or the only one.
float element(SandboxOperand type, unsigned word, int half) {
  if (type == sandbox_tf32) return from_bits(word & 0xffffe000);
  const uint16_t bits = uint16_t(word >> 16 * half);
  return type == sandbox_bf16 ? from_bits(uint32_t(bits) << 16) : from_half(bits);
}

void multiply(Thread* lanes, unsigned) {
  const Mma& first = *static_cast<Mma*>(lanes->frame);
  const int packed = first.type == sandbox_tf32 ? 1 : 2;
  const int words = first.k / (4 * packed);  // of B in a lane; A has one more row half
  float a[16][16], b[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const Mma& f = *static_cast<Mma*>(lanes[lane].frame);
    const int group = lane / 4, place = lane % 4;
    for (int word = 0; word < words; ++word)
      for (int half = 0; half < packed; ++half) {
        const int k = word * 4 * packed + place * packed + half;
        a[group][k] = element(f.type, f.a[2 * word], half);
        a[group + 8][k] = element(f.type, f.a[2 * word + 1], half);
        b[k][group] = element(f.type, f.b[word], half);
      }
  }
  double product[16][8] = {};
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < first.k; ++k)
      for (int column = 0; column < 8; ++column)
        product[row][column] += double(a[row][k]) * b[k][column];
  for (int lane = 0; lane < 32; ++lane) {
    const Mma& f = *static_cast<Mma*>(lanes[lane].frame);
    for (int i = 0; i < 4; ++i)
      f.d[i] = float(f.c[i] + product[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]);
  }
}

struct LoadMatrix {
  unsigned* registers;
  int matrices, transposed;
  const void* row;
};

void load_matrix(Thread* lanes, unsigned) {
  const LoadMatrix& first = *static_cast<LoadMatrix*>(lanes->frame);
  uint16_t rows[4][8][8];
  for (int i = 0; i < 8 * first.matrices; ++i) {
    const void* row = static_cast<LoadMatrix*>(lanes[i].frame)->row;
    if (uintptr_t(row) % 16)
      worker->fault(lanes[i], describe(lanes[i].site) +
                                  " of a row that does not start at a "
                                  "multiple of 16 bytes");
    if (worker->checker) worker->checker->shared_read(lanes[i], row, 16);
    memcpy(rows[i / 8][i % 8], row, 16);
  }
  for (unsigned lane = 0; lane < 32; ++lane) {
    const LoadMatrix& f = *static_cast<LoadMatrix*>(lanes[lane].frame);
    for (int i = 0; i < f.matrices; ++i) {
      uint16_t pair[2];
      for (int half = 0; half < 2; ++half) {
        const unsigned row = lane / 4, column = lane % 4 * 2 + half;
        pair[half] = f.transposed ? rows[i][column][row] : rows[i][row][column];
      }
      memcpy(&f.registers[i], pair, sizeof pair);
    }
  }
}

// These take the whole warp.
void whole_warp(void* frame, Collective operation, SandboxSite site) {
  Thread& self = worker->current();
  if (worker->warp(self).live != ~0u)
    worker->fault(describe(site) + " takes all 32 lanes, but some have returned or never were");
  worker->collective(~0u, frame, operation, site);
}

}  // namespace

extern "C" {

void sandbox_mma(SandboxOperand type, int k, float* d, const unsigned* a, const unsigned* b,
                 const float* c, SandboxSite site) {
  Mma f{type, k, d, a, b, c};
  whole_warp(&f, multiply, site);
}

void sandbox_ldmatrix(unsigned* registers, int matrices, int transposed, const void* row,
                      SandboxSite site) {
  LoadMatrix f{registers, matrices, transposed, row};
  whole_warp(&f, load_matrix, site);
}
}
