// Tensor-core products, the loads that feed them, and asynchronous copies into shared memory, as
// they are on sm_80 and newer. All but the copies are done by a whole warp at once.
//
// On the host a copy takes effect when its thread waits for it and not before.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#ifndef SANDBOX_HOST

// d[16, 8] = a[16, 16] b[16, 8] + c in float; a and b are of Element, __nv_bfloat16 or __half. d
// may be c.
template <typename Element>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const unsigned int (&a)[4],
                                             const unsigned int (&b)[2], const float (&c)[4]);

template <>
__device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(float (&d)[4],
                                                            const unsigned int (&a)[4],
                                                            const unsigned int (&b)[2],
                                                            const float (&c)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]),
        "f"(c[2]), "f"(c[3]));
}

template <>
__device__ __forceinline__ void mma_m16n8k16<__half>(float (&d)[4], const unsigned int (&a)[4],
                                                     const unsigned int (&b)[2],
                                                     const float (&c)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]),
        "f"(c[2]), "f"(c[3]));
}

// d[16, 8] = a[16, 8] b[8, 8] + c, a and b float bits of which the upper 19 count (TF32).
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const unsigned int (&a)[4],
                                                 const unsigned int (&b)[2],
                                                 const float (&c)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]),
        "f"(c[2]), "f"(c[3]));
}

// An address in shared memory that need not be made anew of a pointer at each use, on the host that
// pointer. Constants that are added to it cost nothing.
using SharedAddress = unsigned int;

__device__ __forceinline__ SharedAddress shared_address_of(const void* pointer) {
  return (SharedAddress)__cvta_generic_to_shared(pointer);
}

// Flips bits of an address.
__device__ __forceinline__ SharedAddress flipped(SharedAddress address, int bits) {
  return address ^ bits;
}

// Loads 1, 2 or 4 matrices of 8 x 8 16-bit elements. Lane 8 i + j gives the address of row j of matrix i, a multiple of 16 bytes; register i gets two neighbours of row
// lane / 4 of matrix i.
template <int count>
__device__ __forceinline__ void ldmatrix(unsigned int (&r)[count], SharedAddress address) {
  if constexpr (count == 1) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
                 : "=r"(r[0])
                 : "r"(address)
                 : "memory");
  } else if constexpr (count == 2) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(address)
                 : "memory");
  } else {
    static_assert(count == 4, "ldmatrix loads 1, 2 or 4 matrices");
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
  }
}

// The same with each matrix transposed.
template <int count>
__device__ __forceinline__ void ldmatrix_trans(unsigned int (&r)[count], SharedAddress address) {
  if constexpr (count == 1) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
                 : "=r"(r[0])
                 : "r"(address)
                 : "memory");
  } else if constexpr (count == 2) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(address)
                 : "memory");
  } else {
    static_assert(count == 4, "ldmatrix loads 1, 2 or 4 matrices");
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
  }
}

template <int count>
__device__ __forceinline__ void ldmatrix(unsigned int (&r)[count], const void* row) {
  ldmatrix(r, shared_address_of(row));
}

template <int count>
__device__ __forceinline__ void ldmatrix_trans(unsigned int (&r)[count], const void* row) {
  ldmatrix_trans(r, shared_address_of(row));
}

// Starts a copy of bytes = 4, 8 or 16, to which both addresses are aligned; of these the first
// `source_bytes` come from global memory and the rest are zero.
template <int bytes>
__device__ __forceinline__ void cp_async(void* shared, const void* global,
                                         int source_bytes = bytes) {
  static_assert(bytes == 4 || bytes == 8 || bytes == 16, "cp.async copies 4, 8 or 16 bytes");
  const unsigned int address = (unsigned int)__cvta_generic_to_shared(shared);
  if constexpr (bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global),
                 "r"(source_bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(address), "l"(global),
                 "n"(bytes), "r"(source_bytes)
                 : "memory");
  }
}

// The same of all bytes, or of none: zeros where `there` is 0, whatever the global address then is.
template <int bytes>
__device__ __forceinline__ void cp_async_if(unsigned int there, SharedAddress address,
                                            const void* global) {
  static_assert(bytes == 4 || bytes == 8 || bytes == 16, "cp.async copies 4, 8 or 16 bytes");
  if constexpr (bytes == 16) {
    asm volatile(
        "{\n\t.reg .pred ignored;\n\tsetp.eq.u32 ignored, %2, 0;\n\t"
        "cp.async.cg.shared.global [%0], [%1], 16, ignored;\n\t}" ::"r"(address),
        "l"(global), "r"(there)
        : "memory");
  } else {
    asm volatile(
        "{\n\t.reg .pred ignored;\n\tsetp.eq.u32 ignored, %2, 0;\n\t"
        "cp.async.ca.shared.global [%0], [%1], %3, ignored;\n\t}" ::"r"(address),
        "l"(global), "r"(there), "n"(bytes)
        : "memory");
  }
}

// Ends a group of copies: those that this thread started since the last.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most `groups` of this thread's latest groups are under way. To read what other
// threads copied takes a barrier after that.
template <int groups> __device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory");
}

__device__ __forceinline__ void cp_async_wait_all() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

#else

template <typename Element>
void mma_m16n8k16(float (&d)[4], const unsigned int (&a)[4], const unsigned int (&b)[2],
                  const float (&c)[4], SANDBOX_WHERE) {
  constexpr bool bf16 = std::is_same<Element, __nv_bfloat16>::value;
  static_assert(bf16 || std::is_same<Element, __half>::value, "mma of __nv_bfloat16 or __half");
  sandbox_mma(bf16 ? sandbox_bf16 : sandbox_f16, 16, d, a, b, c,
              SANDBOX_SITE(bf16 ? "mma_m16n8k16<bf16>" : "mma_m16n8k16<half>"));
}

inline void mma_m16n8k8_tf32(float (&d)[4], const unsigned int (&a)[4], const unsigned int (&b)[2],
                             const float (&c)[4], SANDBOX_WHERE) {
  sandbox_mma(sandbox_tf32, 8, d, a, b, c, SANDBOX_SITE("mma_m16n8k8_tf32"));
}

using SharedAddress = const char*;

inline SharedAddress shared_address_of(const void* pointer) {
  return static_cast<const char*>(pointer);
}

inline SharedAddress flipped(SharedAddress address, int bits) {
  return reinterpret_cast<const char*>(reinterpret_cast<unsigned long long>(address) ^ bits);
}

template <int count> void ldmatrix(unsigned int (&r)[count], const void* row, SANDBOX_WHERE) {
  static_assert(count == 1 || count == 2 || count == 4, "ldmatrix loads 1, 2 or 4 matrices");
  sandbox_ldmatrix(r, count, 0, row, SANDBOX_SITE("ldmatrix"));
}

template <int count> void ldmatrix_trans(unsigned int (&r)[count], const void* row, SANDBOX_WHERE) {
  static_assert(count == 1 || count == 2 || count == 4, "ldmatrix loads 1, 2 or 4 matrices");
  sandbox_ldmatrix(r, count, 1, row, SANDBOX_SITE("ldmatrix_trans"));
}

template <int bytes>
void cp_async(void* shared, const void* global, int source_bytes = bytes, SANDBOX_WHERE) {
  static_assert(bytes == 4 || bytes == 8 || bytes == 16, "cp.async copies 4, 8 or 16 bytes");
  sandbox_async_copy(shared, global, bytes, source_bytes, SANDBOX_SITE("cp_async"));
}

template <int bytes>
void cp_async_if(unsigned int there, SharedAddress address, const void* global, SANDBOX_WHERE) {
  static_assert(bytes == 4 || bytes == 8 || bytes == 16, "cp.async copies 4, 8 or 16 bytes");
  sandbox_async_copy(const_cast<char*>(address), global, bytes, there ? bytes : 0,
                     SANDBOX_SITE("cp_async_if"));
}

inline void cp_async_commit() { sandbox_async_commit(); }

template <int groups> void cp_async_wait() { sandbox_async_wait(groups); }

inline void cp_async_wait_all() {
  sandbox_async_commit();
  sandbox_async_wait(0);
}

#endif
