"""Codes with one descale in Numba, a value at a time."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from sandbox.cache_formats import E4M3
from sandbox.kernels import numba_target
from sandbox.kernels.numba_fp8 import fp8_encode
from sandbox.kernels.numba_math import to_float32
from sandbox.kernels.numba_target import cuda
from sandbox.kernels.quantize import quantize_static

THREADS = 64


@functools.cache
def _kernel(dtype: np.dtype) -> Any:
    to_float, encode, one = to_float32(dtype), fp8_encode(E4M3), np.float32(1)

    @cuda.jit
    def static_scalar(x, scale, out):
        token = cuda.blockIdx.x
        reciprocal = one / scale[0]
        for column in range(cuda.threadIdx.x, x.shape[1], THREADS):
            out[token, column] = encode(to_float(x[token, column]) * reciprocal)

    return static_scalar


@quantize_static.variant("numba_scalar", kind="numba", preference=5)
def numba_scalar(x: Any, scale: Any, out: Any) -> None:
    """A block a token, a thread a value."""
    numba_target.launch(_kernel(x.dtype), x.shape[0], THREADS, x, scale, out)
