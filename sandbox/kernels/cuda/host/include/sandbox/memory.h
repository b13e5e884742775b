// Loads and stores with a cache hint, which has no meaning here.
#pragma once

namespace sandbox {

// T, where T is not to be deduced from.
template <typename T>
struct Identity {
  using type = T;
};
template <typename T>
using Same = typename Identity<T>::type;

}  // namespace sandbox

#define SANDBOX_LOAD(name)          \
  template <typename T>             \
  inline T name(const T* address) { \
    return *address;                \
  }
SANDBOX_LOAD(__ldg)
SANDBOX_LOAD(__ldca)
SANDBOX_LOAD(__ldcg)
SANDBOX_LOAD(__ldcs)
SANDBOX_LOAD(__ldlu)
SANDBOX_LOAD(__ldcv)
#undef SANDBOX_LOAD

#define SANDBOX_STORE(name)                              \
  template <typename T>                                  \
  inline void name(T* address, sandbox::Same<T> value) { \
    *address = value;                                    \
  }
SANDBOX_STORE(__stwb)
SANDBOX_STORE(__stcg)
SANDBOX_STORE(__stcs)
SANDBOX_STORE(__stwt)
#undef SANDBOX_STORE

inline size_t __cvta_generic_to_shared(const void* address) { return size_t(address); }
inline size_t __cvta_generic_to_global(const void* address) { return size_t(address); }
