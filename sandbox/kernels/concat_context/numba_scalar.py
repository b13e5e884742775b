"""Keys of a context in Numba, an element at a time."""

from __future__ import annotations

import functools
from typing import Any

from sandbox.kernels import numba_target
from sandbox.kernels.concat_context import concat_context
from sandbox.kernels.numba_target import cuda

THREADS = 64


@functools.cache
def _kernel() -> Any:
    @cuda.jit
    def concat_scalar(k_nope, k_pe, k_out):
        token = cuda.blockIdx.x
        heads, nope, rope = k_nope.shape[1], k_nope.shape[2], k_pe.shape[1]
        for item in range(cuda.threadIdx.x, heads * (nope + rope), THREADS):
            head, column = item // (nope + rope), item % (nope + rope)
            if column < nope:
                k_out[token, head, column] = k_nope[token, head, column]
            else:
                k_out[token, head, column] = k_pe[token, column - nope]

    return concat_scalar


@concat_context.variant("numba_scalar", kind="numba", preference=5)
def numba_scalar(k_nope: Any, k_pe: Any, k_out: Any) -> None:
    """A block a token, a thread an element."""
    numba_target.launch(_kernel(), k_nope.shape[0], THREADS, k_nope, k_pe, k_out)
