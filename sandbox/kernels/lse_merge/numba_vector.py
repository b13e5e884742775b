"""Merge of two states in Numba, in words of up to 8 bytes."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from sandbox.kernels import numba_target
from sandbox.kernels.lse_merge import lse_merge
from sandbox.kernels.lse_merge.launch import base_factors, lanes_for, vector_elements
from sandbox.kernels.lse_merge.numba_scalar import (
    BOTH,
    PREFIX,
    SUFFIX,
    lses_by_token,
    weigher,
)
from sandbox.kernels.numba_math import decode, encode
from sandbox.kernels.numba_target import cuda

THREADS = 128
WORD_BYTES = 8


@functools.cache
def _kernel(dtype: np.dtype, elements: int) -> Any:
    weigh, of_code, to_code = weigher(), decode(dtype), encode(dtype)
    word_type = np.dtype(f"u{elements * dtype.itemsize}").type
    code_type = np.dtype(f"u{dtype.itemsize}").type
    bits = 8 * dtype.itemsize
    nothing = word_type(0)

    @cuda.jit(device=True)
    def mix(left, right, prefix, suffix):
        word = nothing
        for e in range(elements):
            shift = word_type(bits * e)
            value = left * of_code(code_type(prefix >> shift))
            value += right * of_code(code_type(suffix >> shift))
            word |= word_type(word_type(to_code(value)) << shift)
        return word

    @cuda.jit
    def merge_vector(
        prefix, prefix_lse, suffix, suffix_lse, out, out_lse, to_natural, from_natural
    ):
        row = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
        token, head = row // prefix.shape[1], row % prefix.shape[1]
        lse = np.float32(0)
        if token < prefix.shape[0]:
            left, right, lse, source = weigh(
                prefix_lse[token, head], suffix_lse[token, head], to_natural, from_natural
            )
            for i in range(cuda.threadIdx.x, prefix.shape[2], cuda.blockDim.x):
                p, s = prefix[token, head, i], suffix[token, head, i]
                if source == BOTH:
                    out[token, head, i] = mix(left, right, p, s)
                elif source == PREFIX:
                    out[token, head, i] = p
                elif source == SUFFIX:
                    out[token, head, i] = s
                else:
                    out[token, head, i] = nothing
        cuda.syncthreads()  # all have read the row's LSEs, one of which out_lse may be
        if out_lse.shape[0] > 0 and token < prefix.shape[0] and cuda.threadIdx.x == 0:
            out_lse[token, head] = lse

    return merge_vector


@lse_merge.variant("numba_vector", kind="numba", preference=8)
def numba_vector(prefix: Any, suffix: Any, out: Any, lse_layout: str, **arguments: Any) -> None:
    """Part of a warp a row, in 8-byte words where rows allow, decoded and rounded in registers."""
    tokens, heads, head_dim = prefix.shape
    if not tokens * heads:
        return
    elements = vector_elements(prefix, suffix, out, limit=WORD_BYTES)
    word = np.dtype(f"u{elements * prefix.dtype.itemsize}")
    lanes = lanes_for(head_dim // elements)
    prefix_lse, suffix_lse, out_lse = lses_by_token(arguments, lse_layout)
    numba_target.launch(
        _kernel(prefix.dtype, elements),
        -(-tokens * heads * lanes // THREADS),
        (lanes, THREADS // lanes),
        prefix.view(word),
        prefix_lse,
        suffix.view(word),
        suffix_lse,
        out.view(word),
        out_lse,
        *map(np.float32, base_factors(arguments)),
    )
