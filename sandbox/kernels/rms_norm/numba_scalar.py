"""Norm of rows in Numba, a block a row and a thread an element."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from sandbox.kernels import numba_target
from sandbox.kernels.numba_math import from_float32, to_float32
from sandbox.kernels.numba_target import cuda
from sandbox.kernels.rms_norm import rms_norm

THREADS = 32


@functools.cache
def _kernel(dtype: np.dtype) -> Any:
    to_float, from_float = to_float32(dtype), from_float32(dtype)
    zero, one = np.float32(0), np.float32(1)

    @cuda.jit
    def norm_scalar(x, weight, out, inverse_columns, eps):
        row, thread = cuda.blockIdx.x, cuda.threadIdx.x
        sums = cuda.shared.array(THREADS, np.float32)
        total = zero
        for i in range(thread, x.shape[1], THREADS):
            value = to_float(x[row, i])
            total += value * value
        sums[thread] = total
        cuda.syncthreads()
        total = zero
        for i in range(THREADS):
            total += sums[i]
        scale = one / np.float32(math.sqrt(total * inverse_columns + eps))
        for i in range(thread, x.shape[1], THREADS):
            rounded = to_float(from_float(to_float(x[row, i]) * scale))
            out[row, i] = from_float(rounded * to_float(weight[i]))

    return norm_scalar


@rms_norm.variant("numba_scalar", kind="numba", preference=5)
def numba_scalar(x: Any, weight: Any, eps: float, out: Any) -> None:
    """A warp a row, a thread an element, the row read twice."""
    tokens, columns = x.shape
    numbers = np.float32(1 / columns), np.float32(eps)
    numba_target.launch(_kernel(x.dtype), tokens, THREADS, x, weight, out, *numbers)
