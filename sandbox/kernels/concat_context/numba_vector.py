"""Keys of a context in Numba, in words of up to 8 bytes."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from sandbox.kernels import numba_target
from sandbox.kernels.concat_context import concat_context
from sandbox.kernels.concat_context.launch import key_vector
from sandbox.kernels.numba_target import cuda

LANES, WARPS = 32, 4


@functools.cache
def _kernel() -> Any:
    @cuda.jit
    def concat_vector(k_nope, k_pe, k_out):
        token, lane = cuda.blockIdx.x, cuda.threadIdx.x
        nope, rope = k_nope.shape[2], k_pe.shape[1]
        for head in range(cuda.threadIdx.y, k_nope.shape[1], WARPS):
            for place in range(lane, nope, LANES):
                k_out[token, head, place] = k_nope[token, head, place]
        for place in range(lane, rope, LANES):
            key = k_pe[token, place]
            for head in range(cuda.threadIdx.y, k_nope.shape[1], WARPS):
                k_out[token, head, nope + place] = key

    return concat_vector


@concat_context.variant("numba_vector", kind="numba", preference=8)
def numba_vector(k_nope: Any, k_pe: Any, k_out: Any) -> None:
    """A block a token, a warp a head in 8-byte words, the key read once a warp."""
    if not k_nope.shape[0]:
        return
    word = np.dtype(f"u{min(8, key_vector(k_nope, k_pe, k_out))}")
    rows = (array.view(word) for array in (k_nope, k_pe, k_out))
    numba_target.launch(_kernel(), k_nope.shape[0], (LANES, WARPS), *rows)
