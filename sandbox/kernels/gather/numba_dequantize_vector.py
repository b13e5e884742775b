"""Rows of codes to numbers in Numba, a warp a row in words of up to 8 bytes."""

from __future__ import annotations

import functools
from typing import Any

from sandbox.kernels import numba_target
from sandbox.kernels.gather import dequantize_context
from sandbox.kernels.gather.numba_scalar import moved
from sandbox.kernels.gather.numba_vector import LANES, ROWS, elements_a_word
from sandbox.kernels.numba_target import cuda


@functools.cache
def _kernel(restore: Any) -> Any:
    @cuda.jit
    def dequantize_vector(codes, keys, scales, out):
        row = cuda.blockIdx.x * ROWS + cuda.threadIdx.y
        if row < codes.shape[1]:
            for word in range(cuda.threadIdx.x, out.shape[1], LANES):
                restore(codes, keys, scales, 0, row, word, out, row)

    return dequantize_vector


@dequantize_context.variant("numba_vector", kind="numba", preference=8)
def numba_vector(codes: Any, out: Any, **how: Any) -> None:
    """A warp a row, in 8-byte words where rows allow."""
    restore, rows, words = moved(codes[None], out, elements_a_word(codes, out, **how), **how)
    blocks = -(-codes.shape[0] // ROWS)
    numba_target.launch(_kernel(restore), blocks, (LANES, ROWS), *rows, words)
