"""Codes of a context's keys and values in Numba, an element at a time."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from sandbox.cache_formats import E4M3
from sandbox.kernels import numba_target
from sandbox.kernels.concat_context import concat_context_fp8
from sandbox.kernels.numba_fp8 import fp8_encode
from sandbox.kernels.numba_math import to_float32
from sandbox.kernels.numba_target import cuda

THREADS = 64


@functools.cache
def _kernel(dtype: np.dtype) -> Any:
    to_float, encode, one = to_float32(dtype), fp8_encode(E4M3), np.float32(1)

    @cuda.jit
    def fp8_scalar(k_nope, k_pe, v, k_descale, v_descale, k_out, v_out):
        token = cuda.blockIdx.x
        heads, nope, rope, value = k_nope.shape[1], k_nope.shape[2], k_pe.shape[1], v.shape[2]
        width = nope + rope + value
        k_inverse, v_inverse = one / k_descale[0], one / v_descale[0]
        for item in range(cuda.threadIdx.x, heads * width, THREADS):
            head, column = item // width, item % width
            if column < nope:
                x = to_float(k_nope[token, head, column])
                k_out[token, head, column] = encode(x * k_inverse)
            elif column < nope + rope:
                x = to_float(k_pe[token, column - nope])
                k_out[token, head, column] = encode(x * k_inverse)
            else:
                column -= nope + rope
                x = to_float(v[token, head, column])
                v_out[token, head, column] = encode(x * v_inverse)

    return fp8_scalar


@concat_context_fp8.variant("numba_scalar", kind="numba", preference=5)
def numba_scalar(
    k_nope: Any, k_pe: Any, v: Any, k_descale: Any, v_descale: Any, k_out: Any, v_out: Any
) -> None:
    """A block a token, a thread an element."""
    rows = (k_nope, k_pe, v, k_descale, v_descale, k_out, v_out)
    numba_target.launch(_kernel(k_nope.dtype), k_nope.shape[0], THREADS, *rows)
