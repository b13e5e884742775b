// What nvcc or NVRTC gives a kernel without an include, for a plain C++17 compiler.
#pragma once

#include <assert.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include <limits>
#include <type_traits>
#include <utility>

#include <crt/host_defines.h>

#include <vector_types.h>
#include <vector_functions.h>
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "sandbox/runtime.h"
#include "sandbox/math.h"
#include "sandbox/memory.h"
#include "sandbox/atomics.h"
#include "sandbox/block.h"
#include "sandbox/warp.h"
#include "sandbox/half.h"
#include "sandbox/entry.h"

#define __noinline__ __attribute__((noinline))
