// Accesses of 1 to 16 bytes for data that a kernel touches once.
#pragma once

template <int BYTES> struct VectorOf;
template <> struct VectorOf<16> { using type = uint4; };
template <> struct VectorOf<8> { using type = uint2; };
template <> struct VectorOf<4> { using type = unsigned int; };
template <> struct VectorOf<2> { using type = unsigned short; };
template <> struct VectorOf<1> { using type = unsigned char; };
template <int BYTES> using Vector = typename VectorOf<BYTES>::type;

// Load that leaves no line in L1; the memory must not change while the kernel runs.
template <int BYTES> __device__ __forceinline__ Vector<BYTES> load_once(const void* address) {
  const Vector<BYTES>* from = static_cast<const Vector<BYTES>*>(address);
#ifndef SANDBOX_HOST
  if constexpr (BYTES == 16) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
    return v;
  } else {
    return __ldg(from);
  }
#else
  return *from;
#endif
}

// Load that stays ahead of the stores that follow it. One of memory that does not change, as above,
// the compiler moves down to its use where registers are few, and waits there.
template <int BYTES> __device__ __forceinline__ Vector<BYTES> load_ahead(const void* address) {
  const Vector<BYTES>* from = static_cast<const Vector<BYTES>*>(address);
#ifndef SANDBOX_HOST
  Vector<BYTES> v;
  if constexpr (BYTES == 16) {
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
  } else if constexpr (BYTES == 8) {
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                 : "=r"(v.x), "=r"(v.y)
                 : "l"(from));
  } else if constexpr (BYTES == 4) {
    asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(from));
  } else {
    v = *from;
  }
  return v;
#else
  return *from;
#endif
}

// Store marked as the first to leave the caches.
template <int BYTES> __device__ __forceinline__ void store_once(void* address, Vector<BYTES> v) {
  __stcs(static_cast<Vector<BYTES>*>(address), v);
}
