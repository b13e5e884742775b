"""Device functions for Numba kernels: the largest magnitude of a group."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from sandbox.kernels.numba_math import to_float32
from sandbox.kernels.numba_target import cuda


@functools.cache
def finite_amax(dtype: np.dtype) -> Any:
    """Device function `(x, token, start, size) -> float32`: of the finite values, 0 without one."""
    to_float, zero, infinity = to_float32(dtype), np.float32(0), np.float32(np.inf)

    @cuda.jit(device=True)
    def amax_of(x, token, start, size):
        amax = zero
        for i in range(size):
            magnitude = abs(to_float(x[token, start + i]))
            if magnitude < infinity and magnitude > amax:
                amax = magnitude
        return amax

    return amax_of
