"""Projections in Numba, a thread a result."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from sandbox.kernels import numba_target
from sandbox.kernels.linear import linear
from sandbox.kernels.numba_columns import array_or_empty
from sandbox.kernels.numba_math import from_float32, to_float32
from sandbox.kernels.numba_target import cuda

THREADS = 64


@functools.cache
def _kernel(dtype: np.dtype) -> Any:
    to_float, from_float = to_float32(dtype), from_float32(dtype)

    @cuda.jit
    def linear_scalar(x, weight, bias, out):
        token = cuda.blockIdx.y
        row = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        if row < weight.shape[0]:
            total = to_float(bias[row]) if bias.shape[0] else np.float32(0)
            for i in range(x.shape[1]):
                total += to_float(x[token, i]) * to_float(weight[row, i])
            out[token, row] = from_float(total)

    return linear_scalar


@linear.variant("numba_scalar", kind="numba", preference=5)
def numba_scalar(x: Any, weight: Any, bias: Any, out: Any) -> None:
    """A thread a result, and all of its products."""
    grid = (-(-weight.shape[0] // THREADS), x.shape[0])
    bias = array_or_empty(bias, x, dtype=x.dtype)
    numba_target.launch(_kernel(x.dtype), grid, THREADS, x, weight, bias, out)
