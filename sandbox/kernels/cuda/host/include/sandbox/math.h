// CUDA's integer, cast and float intrinsics. Approximations of the device (`__expf`, `rsqrtf`, ...)
// are the accurate functions here.
#pragma once

using std::isfinite;
using std::isinf;
using std::isnan;
using std::signbit;

namespace sandbox {

template <typename To, typename From>
To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From), "a cast of bits keeps the size");
  To result;
  __builtin_memcpy(&result, &value, sizeof result);
  return result;
}

// Rounded float or double to an integer type: saturates as the device does, NaN is 0 (or the lowest
// value's bits for 64 bits).
template <typename To, typename From>
To to_integer(From value) {
  constexpr To lowest = std::numeric_limits<To>::min(), highest = std::numeric_limits<To>::max();
  if (value != value) return sizeof(To) == 8 ? To(1ULL << 63) : To(0);
  if (value <= From(lowest)) return lowest;
  if (value >= From(highest)) return highest;
  return To(value);
}

}  // namespace sandbox

#define SANDBOX_MIN_MAX(T)                         \
  inline T min(T a, T b) { return b < a ? b : a; } \
  inline T max(T a, T b) { return a < b ? b : a; }
SANDBOX_MIN_MAX(int)
SANDBOX_MIN_MAX(unsigned)
SANDBOX_MIN_MAX(long)
SANDBOX_MIN_MAX(unsigned long)
SANDBOX_MIN_MAX(long long)
SANDBOX_MIN_MAX(unsigned long long)
#undef SANDBOX_MIN_MAX
inline unsigned min(int a, unsigned b) { return min(unsigned(a), b); }
inline unsigned min(unsigned a, int b) { return min(a, unsigned(b)); }
inline unsigned max(int a, unsigned b) { return max(unsigned(a), b); }
inline unsigned max(unsigned a, int b) { return max(a, unsigned(b)); }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline double min(float a, double b) { return fmin(a, b); }
inline double min(double a, float b) { return fmin(a, b); }
inline double max(float a, double b) { return fmax(a, b); }
inline double max(double a, float b) { return fmax(a, b); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }

inline unsigned __brev(unsigned x) {
  unsigned reversed = 0;
  for (int bit = 0; bit < 32; ++bit) reversed |= (x >> bit & 1u) << (31 - bit);
  return reversed;
}

inline unsigned long long __brevll(unsigned long long x) {
  return (unsigned long long)__brev(unsigned(x)) << 32 | __brev(unsigned(x >> 32));
}

inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const unsigned long long bytes = (unsigned long long)high << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned choice = selector >> 4 * i;
    unsigned byte = unsigned(bytes >> 8 * (choice & 7)) & 0xff;
    if (choice & 8) byte = byte & 0x80 ? 0xff : 0;  // the sign, replicated
    result |= byte << 8 * i;
  }
  return result;
}

inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return unsigned(((unsigned long long)high << 32 | low) << (shift & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return unsigned(((unsigned long long)high << 32 | low) >> (shift & 31));
}

inline int __mulhi(int a, int b) { return int((long long)a * b >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return unsigned((unsigned long long)a * b >> 32);
}
inline long long __mul64hi(long long a, long long b) { return (long long)((__int128)a * b >> 64); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)((unsigned __int128)a * b >> 64);
}
inline unsigned __umul24(unsigned a, unsigned b) { return (a & 0xffffff) * (b & 0xffffff); }
inline int __mul24(int a, int b) {
  return int(unsigned(int(unsigned(a) << 8) >> 8) * unsigned(int(unsigned(b) << 8) >> 8));
}
inline unsigned __usad(unsigned a, unsigned b, unsigned sum) {
  return sum + (a < b ? b - a : a - b);
}

inline int __dp4a(int a, int b, int sum) {
  for (int i = 0; i < 4; ++i) sum += int8_t(a >> 8 * i) * int8_t(b >> 8 * i);
  return sum;
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned sum) {
  for (int i = 0; i < 4; ++i) sum += (a >> 8 * i & 0xff) * (b >> 8 * i & 0xff);
  return sum;
}

inline int __float_as_int(float x) { return sandbox::bits_as<int>(x); }
inline unsigned __float_as_uint(float x) { return sandbox::bits_as<unsigned>(x); }
inline float __int_as_float(int x) { return sandbox::bits_as<float>(x); }
inline float __uint_as_float(unsigned x) { return sandbox::bits_as<float>(x); }
inline long long __double_as_longlong(double x) { return sandbox::bits_as<long long>(x); }
inline double __longlong_as_double(long long x) { return sandbox::bits_as<double>(x); }

#define SANDBOX_TO_INTEGER(name, From, To)                                          \
  inline To __##name##_rn(From x) { return sandbox::to_integer<To>(nearbyint(x)); } \
  inline To __##name##_rz(From x) { return sandbox::to_integer<To>(trunc(x)); }     \
  inline To __##name##_rd(From x) { return sandbox::to_integer<To>(floor(x)); }     \
  inline To __##name##_ru(From x) { return sandbox::to_integer<To>(ceil(x)); }
SANDBOX_TO_INTEGER(float2int, float, int)
SANDBOX_TO_INTEGER(float2uint, float, unsigned)
SANDBOX_TO_INTEGER(float2ll, float, long long)
SANDBOX_TO_INTEGER(float2ull, float, unsigned long long)
SANDBOX_TO_INTEGER(double2int, double, int)
SANDBOX_TO_INTEGER(double2uint, double, unsigned)
SANDBOX_TO_INTEGER(double2ll, double, long long)
SANDBOX_TO_INTEGER(double2ull, double, unsigned long long)
#undef SANDBOX_TO_INTEGER

inline float __int2float_rn(int x) { return float(x); }
inline float __uint2float_rn(unsigned x) { return float(x); }
inline float __ll2float_rn(long long x) { return float(x); }
inline float __ull2float_rn(unsigned long long x) { return float(x); }
inline float __double2float_rn(double x) { return float(x); }
inline double __int2double_rn(int x) { return x; }
inline double __uint2double_rn(unsigned x) { return x; }
inline double __ll2double_rn(long long x) { return double(x); }

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return float(1.0 / sqrt(double(x))); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline double __drcp_rn(double x) { return 1.0 / x; }
inline double __dsqrt_rn(double x) { return sqrt(x); }

inline float rsqrtf(float x) { return __frsqrt_rn(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float rsqrt(float x) { return rsqrtf(x); }
inline float rcbrtf(float x) { return 1.0f / cbrtf(x); }
inline float __saturatef(float x) { return x > 0.0f ? x < 1.0f ? x : 1.0f : 0.0f; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __log10f(float x) { return log10f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __tanf(float x) { return tanf(x); }
inline float __tanhf(float x) { return tanhf(x); }
inline void __sincosf(float x, float* sine, float* cosine) { *sine = sinf(x), *cosine = cosf(x); }
#ifndef __USE_GNU  // glibc has these as GNU extensions
inline float exp10f(float x) { return powf(10.0f, x); }
inline double exp10(double x) { return pow(10.0, x); }
inline void sincosf(float x, float* sine, float* cosine) { __sincosf(x, sine, cosine); }
inline void sincos(double x, double* sine, double* cosine) { *sine = sin(x), *cosine = cos(x); }
#endif
inline float __exp10f(float x) { return exp10f(x); }
inline void sincospif(float x, float* sine, float* cosine) {
  *sine = float(sin(M_PI * x)), *cosine = float(cos(M_PI * x));
}
inline float normcdff(float x) { return float(0.5 * erfc(-double(x) * M_SQRT1_2)); }
