// Stands in for NVIDIA's file of this name: gives their headers, and kernels, to a plain C++ compiler.
#pragma once

#define __host__
#define __device__
#define __global__
#define __constant__
#define __managed__
#define __shared__ thread_local
#define __grid_constant__
#define __launch_bounds__(...)
#define __maxnreg__(n)
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define CUDARTAPI
#define CUDARTAPI_CDECL
