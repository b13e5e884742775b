// What cuda_fp16.h and cuda_bf16.h keep from a host compiler. An operation is done in double, where
// sums and products of these types are exact or nearly so, and rounded once.
#pragma once

namespace sandbox {

inline double widen(__half x) { return __half2float(x); }
inline double widen(__nv_bfloat16 x) { return __bfloat162float(x); }
template <typename T>
T narrow(double x);
template <>
inline __half narrow(double x) {
  return __double2half(x);
}
template <>
inline __nv_bfloat16 narrow(double x) {
  return __double2bfloat16(x);
}

}  // namespace sandbox

// Functions of one value, for the type and for its pair.
#define SANDBOX_UNARY(T, T2, name, expression) \
  inline T h##name(T a) {                      \
    const double x = sandbox::widen(a);        \
    return sandbox::narrow<T>(expression);     \
  }                                            \
  inline T2 h2##name(T2 a) { return T2(h##name(T(a.x)), h##name(T(a.y))); }

#define SANDBOX_HALF(T, T2)                                                                  \
  SANDBOX_UNARY(T, T2, exp, exp(x))                                                          \
  SANDBOX_UNARY(T, T2, exp2, exp2(x))                                                        \
  SANDBOX_UNARY(T, T2, exp10, exp10(x))                                                      \
  SANDBOX_UNARY(T, T2, log, log(x))                                                          \
  SANDBOX_UNARY(T, T2, log2, log2(x))                                                        \
  SANDBOX_UNARY(T, T2, log10, log10(x))                                                      \
  SANDBOX_UNARY(T, T2, sqrt, sqrt(x))                                                        \
  SANDBOX_UNARY(T, T2, rsqrt, 1.0 / sqrt(x))                                                 \
  SANDBOX_UNARY(T, T2, rcp, 1.0 / x)                                                         \
  SANDBOX_UNARY(T, T2, sin, sin(x))                                                          \
  SANDBOX_UNARY(T, T2, cos, cos(x))                                                          \
  SANDBOX_UNARY(T, T2, tanh, tanh(x))                                                        \
  SANDBOX_UNARY(T, T2, ceil, ceil(x))                                                        \
  SANDBOX_UNARY(T, T2, floor, floor(x))                                                      \
  SANDBOX_UNARY(T, T2, rint, nearbyint(x))                                                   \
  SANDBOX_UNARY(T, T2, trunc, trunc(x))                                                      \
  inline T __hfma(T a, T b, T c) {                                                           \
    return sandbox::narrow<T>(fma(sandbox::widen(a), sandbox::widen(b), sandbox::widen(c))); \
  }                                                                                          \
  inline T __hfma_sat(T a, T b, T c) {                                                       \
    const T r = __hfma(a, b, c);                                                             \
    return __hmin(__hmax(r, T(0.0f)), T(1.0f));                                              \
  }                                                                                          \
  inline T __hfma_relu(T a, T b, T c) { return __hmax_nan(__hfma(a, b, c), T(0.0f)); }       \
  inline T2 __hfma2(T2 a, T2 b, T2 c) {                                                      \
    return T2(__hfma(T(a.x), T(b.x), T(c.x)), __hfma(T(a.y), T(b.y), T(c.y)));               \
  }                                                                                          \
  inline T2 __hfma2_sat(T2 a, T2 b, T2 c) {                                                  \
    return T2(__hfma_sat(T(a.x), T(b.x), T(c.x)), __hfma_sat(T(a.y), T(b.y), T(c.y)));       \
  }                                                                                          \
  inline T2 __hfma2_relu(T2 a, T2 b, T2 c) {                                                 \
    return T2(__hfma_relu(T(a.x), T(b.x), T(c.x)), __hfma_relu(T(a.y), T(b.y), T(c.y)));     \
  }
SANDBOX_HALF(__half, __half2)
SANDBOX_HALF(__nv_bfloat16, __nv_bfloat162)
#undef SANDBOX_HALF
#undef SANDBOX_UNARY

#define SANDBOX_TO_INTEGER(name, T, To)                                                          \
  inline To __##name##_rn(T x) { return sandbox::to_integer<To>(nearbyint(sandbox::widen(x))); } \
  inline To __##name##_rd(T x) { return sandbox::to_integer<To>(floor(sandbox::widen(x))); }     \
  inline To __##name##_ru(T x) { return sandbox::to_integer<To>(ceil(sandbox::widen(x))); }
SANDBOX_TO_INTEGER(half2int, __half, int)
SANDBOX_TO_INTEGER(half2uint, __half, unsigned)
SANDBOX_TO_INTEGER(bfloat162int, __nv_bfloat16, int)
SANDBOX_TO_INTEGER(bfloat162uint, __nv_bfloat16, unsigned)
#undef SANDBOX_TO_INTEGER
