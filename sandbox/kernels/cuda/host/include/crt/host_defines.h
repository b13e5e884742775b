// The words that CUDA adds to C++, for a plain compiler. NVIDIA's headers include a file of this
// name, which a whole toolkit has and some packages of headers lack.
#pragma once

#if __has_include_next(<crt/host_defines.h>)
#include_next <crt/host_defines.h>
#else
#define __host__
#define __device__
#define __constant__
#define __managed__
#define __nv_pure__
#define __tile__
#define __tile_global__
#define __tile_builtin__
#define __experimental_foreign_decl__
#define __experimental_foreign_name__(x)
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __forceinline__ __inline__ __attribute__((always_inline))
#define __inline_hint__
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __annotate__(a)
#define __location__(a)
#define __specialization_static
#define __NV_TL__
#define __NV_TL_BUILTIN__
#define CUDARTAPI
#define CUDARTAPI_CDECL
#endif

#undef __noinline__  // the standard library has it in attributes of its own
#undef __shared__
#undef __global__
#undef __grid_constant__
#undef __launch_bounds__
#undef __maxnreg__
#undef __cluster_dims__
#undef __block_size__
#define __shared__ thread_local
#define __global__ __attribute__((noinline))  // else a run could see the threadIdx of the last
#define __grid_constant__
#define __launch_bounds__(...)
#define __maxnreg__(n)
#define __cluster_dims__(...)
#define __block_size__(...)
