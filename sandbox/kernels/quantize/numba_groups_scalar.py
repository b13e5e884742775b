"""Codes with a descale a group in Numba, a value at a time."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from sandbox.cache_formats import E4M3
from sandbox.kernels import numba_target
from sandbox.kernels.numba_fp8 import fp8_encode
from sandbox.kernels.numba_math import to_float32
from sandbox.kernels.numba_target import cuda
from sandbox.kernels.quantize import quantize_groups
from sandbox.kernels.quantize.numba_amax import finite_amax
from sandbox.kernels.quantize.reference import LEAST_AMAX

THREADS = 32


@functools.cache
def _kernel(dtype: np.dtype, power_of_two: bool) -> Any:
    to_float, encode, amax_of = to_float32(dtype), fp8_encode(E4M3), finite_amax(dtype)
    least, largest = LEAST_AMAX, np.float32(E4M3.largest)
    mantissa, exponent = np.uint32(0x007FFFFF), np.uint32(0x7F800000)

    @cuda.jit
    def groups_scalar(x, out, out_scales, size):
        token = cuda.blockIdx.x
        for group in range(cuda.threadIdx.x, out_scales.shape[1], THREADS):
            start = group * size
            scale = max(amax_of(x, token, start, size), least) / largest
            if power_of_two:
                scale = np.uint32((scale.view(np.uint32) + mantissa) & exponent).view(np.float32)
            for i in range(size):
                out[token, start + i] = encode(to_float(x[token, start + i]) / scale)
            out_scales[token, group] = scale

    return groups_scalar


@quantize_groups.variant("numba_scalar", kind="numba", preference=5)
def numba_scalar(
    x: Any, group_size: int, scale_format: str, scale_layout: str, out: Any, out_scales: Any
) -> None:
    """A block a token, a thread a group, which it reads twice."""
    kernel = _kernel(x.dtype, scale_format == "ue8m0")
    numba_target.launch(kernel, x.shape[0], THREADS, x, out, out_scales, group_size)
