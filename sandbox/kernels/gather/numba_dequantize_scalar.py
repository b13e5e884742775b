"""Rows of codes to numbers in Numba, one thread an element."""

from __future__ import annotations

import functools
from typing import Any

from sandbox.kernels import numba_target
from sandbox.kernels.gather import dequantize_context
from sandbox.kernels.gather.numba_scalar import THREADS, moved
from sandbox.kernels.numba_target import cuda


@functools.cache
def _kernel(restore: Any) -> Any:
    @cuda.jit
    def dequantize_scalar(codes, keys, scales, out):
        element = cuda.grid(1)
        row = element // out.shape[1]
        if row < codes.shape[1]:
            restore(codes, keys, scales, 0, row, element % out.shape[1], out, row)

    return dequantize_scalar


@dequantize_context.variant("numba_scalar", kind="numba", preference=5)
def numba_scalar(codes: Any, out: Any, **how: Any) -> None:
    """One thread an element."""
    restore, rows, words = moved(codes[None], out, 1, **how)
    blocks = -(-codes.shape[0] * out.shape[1] // THREADS)
    numba_target.launch(_kernel(restore), blocks, THREADS, *rows, words)
