// What the compiler keeps in registers and what it computes anew.
#pragma once

// The value itself, which is kept in a register: what comes out of a shuffle cannot be derived or read
// again, as the compiler prefers to, where that takes long.
__device__ __forceinline__ int kept(int value) {
  return __shfl_sync(0xffffffffu, value, threadIdx.x % 32);
}

// The value itself, from which nothing is derived ahead of this place, to be kept from there on.
template <class Number> __device__ __forceinline__ Number fresh(Number value) {
#ifndef SANDBOX_HOST
  asm volatile("" : "+r"(value));
#endif
  return value;
}
