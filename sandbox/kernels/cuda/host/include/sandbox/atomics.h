// Atomics on any type of 2, 4 or 8 bytes, all as a loop of compare and swap: blocks run on several
// OS threads.
#pragma once

namespace sandbox {

template <int size>
struct Bits;
template <>
struct Bits<2> {
  using type = uint16_t;
};
template <>
struct Bits<4> {
  using type = uint32_t;
};
template <>
struct Bits<8> {
  using type = uint64_t;
};

template <typename T, typename Function>
T atomic_update(T* address, Function next) {
  using Word = typename Bits<sizeof(T)>::type;
  T old, desired;
#if SANDBOX_CHECKED
  uint64_t expected = sandbox_atomic_load(address, sizeof(T));
  do {
    const Word narrow = Word(expected);
    __builtin_memcpy(&old, &narrow, sizeof(T));
    desired = next(old);
    Word bits;
    __builtin_memcpy(&bits, &desired, sizeof(T));
    if (sandbox_atomic_swap_if(address, sizeof(T), &expected, bits)) return old;
  } while (true);
#else
  Word* word = reinterpret_cast<Word*>(address);
  Word expected = __atomic_load_n(word, __ATOMIC_RELAXED), bits;
  do {
    __builtin_memcpy(&old, &expected, sizeof(T));
    desired = next(old);
    __builtin_memcpy(&bits, &desired, sizeof(T));
  } while (!__atomic_compare_exchange_n(word, &expected, bits, true, __ATOMIC_SEQ_CST,
                                        __ATOMIC_RELAXED));
  return old;
#endif
}

template <typename T>
T wrapping_add(T a, T b) {
  if constexpr (std::is_integral<T>::value)
    return T(std::make_unsigned_t<T>(a) + std::make_unsigned_t<T>(b));
  else
    return a + b;
}

}  // namespace sandbox

template <typename T>
T atomicAdd(T* address, sandbox::Same<T> value) {
  return sandbox::atomic_update(address, [=](T old) { return sandbox::wrapping_add(old, value); });
}

template <typename T>
T atomicSub(T* address, sandbox::Same<T> value) {
  return atomicAdd(address, T(~std::make_unsigned_t<T>(value) + 1));
}

template <typename T>
T atomicExch(T* address, sandbox::Same<T> value) {
  return sandbox::atomic_update(address, [=](T) { return value; });
}

template <typename T>
T atomicCAS(T* address, sandbox::Same<T> compare, sandbox::Same<T> value) {
  return sandbox::atomic_update(address, [=](T old) { return old == compare ? value : old; });
}

template <typename T>
T atomicMin(T* address, sandbox::Same<T> value) {
  return sandbox::atomic_update(address, [=](T old) { return value < old ? value : old; });
}

template <typename T>
T atomicMax(T* address, sandbox::Same<T> value) {
  return sandbox::atomic_update(address, [=](T old) { return old < value ? value : old; });
}

template <typename T>
T atomicAnd(T* address, sandbox::Same<T> value) {
  return sandbox::atomic_update(address, [=](T old) { return T(old & value); });
}

template <typename T>
T atomicOr(T* address, sandbox::Same<T> value) {
  return sandbox::atomic_update(address, [=](T old) { return T(old | value); });
}

template <typename T>
T atomicXor(T* address, sandbox::Same<T> value) {
  return sandbox::atomic_update(address, [=](T old) { return T(old ^ value); });
}

inline unsigned atomicInc(unsigned* address, unsigned last) {
  return sandbox::atomic_update(address, [=](unsigned old) { return old >= last ? 0u : old + 1; });
}

inline unsigned atomicDec(unsigned* address, unsigned last) {
  return sandbox::atomic_update(
      address, [=](unsigned old) { return old == 0 || old > last ? last : old - 1; });
}
