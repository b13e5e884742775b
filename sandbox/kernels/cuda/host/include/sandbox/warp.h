// Exchanges between the lanes of a warp.
#pragma once

namespace sandbox {

template <typename T>
T shuffle(unsigned mask, T value, int source, SandboxSite site) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value,
                "a shuffle moves 1 to 8 bytes");
  sandbox_shuffle(mask, &value, sizeof(T), source, site);
  return value;
}

// The first lane of the segment of `width` lanes that the caller is in.
inline int segment(int width) { return int(sandbox_lane()) & ~(width - 1); }

}  // namespace sandbox

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, SANDBOX_WHERE) {
  return sandbox::shuffle(mask, value, sandbox::segment(width) + (source & (width - 1)),
                          SANDBOX_SITE("__shfl_sync"));
}

template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, SANDBOX_WHERE) {
  const int lane = sandbox_lane(), source = lane - int(delta);
  return sandbox::shuffle(mask, value, source < sandbox::segment(width) ? lane : source,
                          SANDBOX_SITE("__shfl_up_sync"));
}

template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, SANDBOX_WHERE) {
  const int lane = sandbox_lane(), source = lane + int(delta);
  return sandbox::shuffle(mask, value, source >= sandbox::segment(width) + width ? lane : source,
                          SANDBOX_SITE("__shfl_down_sync"));
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, SANDBOX_WHERE) {
  const int lane = sandbox_lane(), source = lane ^ lane_mask;
  return sandbox::shuffle(mask, value, source >= sandbox::segment(width) + width ? lane : source,
                          SANDBOX_SITE("__shfl_xor_sync"));
}

inline void __syncwarp(unsigned mask = 0xffffffff, SANDBOX_WHERE) {
  sandbox_warp_barrier(mask, SANDBOX_SITE("__syncwarp"));
}

inline unsigned __activemask() { return sandbox_active_mask(); }

inline unsigned __ballot_sync(unsigned mask, int predicate, SANDBOX_WHERE) {
  return sandbox_ballot(mask, predicate, SANDBOX_SITE("__ballot_sync"));
}

inline int __any_sync(unsigned mask, int predicate, SANDBOX_WHERE) {
  return sandbox_ballot(mask, predicate, SANDBOX_SITE("__any_sync")) != 0;
}

inline int __all_sync(unsigned mask, int predicate, SANDBOX_WHERE) {
  return sandbox_ballot(mask, !predicate, SANDBOX_SITE("__all_sync")) == 0;
}

template <typename T>
unsigned __match_any_sync(unsigned mask, T value, SANDBOX_WHERE) {
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof value);
  return sandbox_match(mask, bits, SANDBOX_SITE("__match_any_sync"));
}

template <typename T>
unsigned __match_all_sync(unsigned mask, T value, int* predicate, SANDBOX_WHERE) {
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof value);
  const unsigned same = sandbox_match(mask, bits, SANDBOX_SITE("__match_all_sync"));
  *predicate = same == (mask & sandbox_active_mask());
  return *predicate ? mask : 0;
}

#define SANDBOX_REDUCE(how, T)                                                                    \
  inline T __reduce_##how##_sync(unsigned mask, T value, SANDBOX_WHERE) {                         \
    return T(sandbox_reduce(mask, value, sandbox_##how, SANDBOX_SITE("__reduce_" #how "_sync"))); \
  }
SANDBOX_REDUCE(add, unsigned)
SANDBOX_REDUCE(add, int)
SANDBOX_REDUCE(min, unsigned)
SANDBOX_REDUCE(min, int)
SANDBOX_REDUCE(max, unsigned)
SANDBOX_REDUCE(max, int)
SANDBOX_REDUCE(and, unsigned)
SANDBOX_REDUCE(or, unsigned)
SANDBOX_REDUCE(xor, unsigned)
#undef SANDBOX_REDUCE
