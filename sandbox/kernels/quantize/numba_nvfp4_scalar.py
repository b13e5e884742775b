"""Codes of 4 bits in Numba, a value at a time."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np

from sandbox.cache_formats import E4M3, Float8
from sandbox.kernels import numba_target
from sandbox.kernels.numba_fp8 import fp8_decode, fp8_encode
from sandbox.kernels.numba_math import to_float32
from sandbox.kernels.numba_target import cuda
from sandbox.kernels.quantize import e2m1, quantize_nvfp4
from sandbox.kernels.quantize.numba_amax import finite_amax
from sandbox.kernels.quantize.reference import BLOCK

THREADS = 32
E2M1 = Float8(np.dtype(ml_dtypes.float4_e2m1fn), 1, 0, float(e2m1.LARGEST))
"""As the codec of 8-bit floats has it: the sign in bit 7, and a NaN 0x7F."""


@functools.cache
def _kernel(dtype: np.dtype) -> Any:
    to_float, amax_of = to_float32(dtype), finite_amax(dtype)
    scale_code, scale_value, encode = fp8_encode(E4M3), fp8_decode(E4M3), fp8_encode(E2M1)
    largest, zero, size = e2m1.LARGEST, np.float32(0), BLOCK

    @cuda.jit(device=True)
    def code(value, step):
        if value != value or not step > zero:
            return np.uint32(0)
        wide = np.uint32(encode(value / step))
        return np.uint32((wide & np.uint32(7)) | ((wide >> np.uint32(4)) & np.uint32(8)))

    @cuda.jit
    def nvfp4_scalar(x, global_scale, out, out_scales):
        token = cuda.blockIdx.x
        for block in range(cuda.threadIdx.x, out_scales.shape[1], THREADS):
            start = block * size
            scale = scale_code(amax_of(x, token, start, size) / largest / global_scale[0])
            step = scale_value(scale) * global_scale[0]
            for i in range(start, start + size, 2):
                low = code(to_float(x[token, i]), step)
                high = code(to_float(x[token, i + 1]), step)
                out[token, i // 2] = np.uint8(low | np.uint32(high << np.uint32(4)))
            out_scales[token, block] = scale

    return nvfp4_scalar


@quantize_nvfp4.variant("numba_scalar", kind="numba", preference=5)
def numba_scalar(x: Any, global_scale: Any, out: Any, out_scales: Any) -> None:
    """A block a token, a thread a block of values, which it reads twice."""
    arguments = (x, global_scale, out, out_scales)
    numba_target.launch(_kernel(x.dtype), x.shape[0], THREADS, *arguments)
