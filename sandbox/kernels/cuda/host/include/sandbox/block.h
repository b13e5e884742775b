// Barriers of a block.
#pragma once

#define SANDBOX_WHERE const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define SANDBOX_SITE(name) \
  SandboxSite { name, file, line }

constexpr int warpSize = 32;

inline void __syncthreads(SANDBOX_WHERE) { sandbox_barrier(0, SANDBOX_SITE("__syncthreads")); }

inline int __syncthreads_count(int predicate, SANDBOX_WHERE) {
  return sandbox_barrier(predicate, SANDBOX_SITE("__syncthreads_count")).count;
}

inline int __syncthreads_and(int predicate, SANDBOX_WHERE) {
  return sandbox_barrier(predicate, SANDBOX_SITE("__syncthreads_and")).all;
}

inline int __syncthreads_or(int predicate, SANDBOX_WHERE) {
  return sandbox_barrier(predicate, SANDBOX_SITE("__syncthreads_or")).any;
}

inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __threadfence(); }
inline void __threadfence_system() { __threadfence(); }

inline void __nanosleep(unsigned) { sandbox_yield(); }

[[noreturn]] inline void __trap(SANDBOX_WHERE) { sandbox_trap("__trap()", file, line); }

#define __assume(condition) \
  ((condition) ? void() : sandbox_trap("assumption `" #condition "` is wrong", __FILE__, __LINE__))
#ifndef __clang__
#define __builtin_assume(condition) __assume(condition)
#endif

inline long long clock64() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000LL + now.tv_nsec;
}
inline unsigned long long __globaltimer() { return clock64(); }
