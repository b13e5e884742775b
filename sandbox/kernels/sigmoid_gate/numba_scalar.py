"""Gated rows in Numba, a block a row and a thread an element."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from sandbox.kernels import numba_target
from sandbox.kernels.numba_math import from_float32, to_float32
from sandbox.kernels.numba_target import cuda
from sandbox.kernels.sigmoid_gate import sigmoid_gate

THREADS = 64


@functools.cache
def _kernel(dtype: np.dtype) -> Any:
    to_float, from_float = to_float32(dtype), from_float32(dtype)
    zero, one = np.float32(0), np.float32(1)

    @cuda.jit
    def gate_scalar(x, gate, out):
        row = cuda.blockIdx.x
        for i in range(cuda.threadIdx.x, x.shape[1], THREADS):
            value, opening = to_float(x[row, i]), to_float(gate[row, i])
            if value != zero:  # 0 * NaN is NaN
                less = np.float32(math.exp(-abs(opening)))
                value *= (one if opening >= zero else less) / (one + less)
            out[row, i] = from_float(value)

    return gate_scalar


@sigmoid_gate.variant("numba_scalar", kind="numba", preference=5)
def numba_scalar(x: Any, gate: Any, out: Any) -> None:
    """A block a row, a thread an element."""
    numba_target.launch(_kernel(x.dtype), x.shape[0], THREADS, x, gate, out)
