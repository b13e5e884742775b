"""Merge of two states in Numba, in words of up to 8 bytes."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from sandbox.kernels import numba_target
from sandbox.kernels.lse_merge import lse_merge
from sandbox.kernels.lse_merge.launch import lanes_for, vector_elements
from sandbox.kernels.lse_merge.numba_merge import (
    BOTH,
    NEITHER,
    PREFIX,
    coder,
    lses_by_token,
    rounder,
    scalars,
    weigher,
)
from sandbox.kernels.numba_columns import inverse
from sandbox.kernels.numba_math import decode, encode
from sandbox.kernels.numba_target import cuda

THREADS = 128
WORD_BYTES = 8


@functools.cache
def _word_makers(dtype: np.dtype, out_dtype: np.dtype, elements: int) -> tuple[Any, Any]:
    """Device functions to words of results: of both states' words, and of the only state's."""
    of_code, to_code = decode(dtype), rounder(out_dtype, encode)
    code, bits = np.dtype(f"u{dtype.itemsize}").type, 8 * dtype.itemsize
    out_word, out_bits = np.dtype(f"u{elements * out_dtype.itemsize}").type, 8 * out_dtype.itemsize
    in_word = np.dtype(f"u{elements * dtype.itemsize}").type

    @cuda.jit(device=True)
    def mixed(left, right, prefix, suffix, scale):
        word = out_word(0)
        for e in range(elements):
            value = left * of_code(code(prefix >> in_word(bits * e)))
            value += right * of_code(code(suffix >> in_word(bits * e)))
            word |= out_word(out_word(to_code(value, scale)) << out_word(out_bits * e))
        return word

    @cuda.jit(device=True)
    def coded(state, scale):
        word = out_word(0)
        for e in range(elements):
            value = of_code(code(state >> in_word(bits * e)))
            word |= out_word(out_word(to_code(value, scale)) << out_word(out_bits * e))
        return word

    @cuda.jit(device=True)
    def copied(state, scale):
        return state

    return mixed, coded if coder(out_dtype) else copied


@functools.cache
def _kernel(dtype: np.dtype, out_dtype: np.dtype, elements: int) -> Any:
    weigh, inverse_of = weigher(), inverse()
    mixed, alone = _word_makers(dtype, out_dtype, elements)
    nothing, no_lse = np.dtype(f"u{elements * out_dtype.itemsize}").type(0), np.float32(-np.inf)

    @cuda.jit
    def merge_vector(
        prefix,
        prefix_lse,
        suffix,
        suffix_lse,
        out,
        out_lse,
        to_natural,
        from_natural,
        output_scale,
        context_tokens,
    ):
        row = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
        token, head = row // prefix.shape[1], row % prefix.shape[1]
        lse = no_lse
        if token < prefix.shape[0]:
            has_prefix = token < context_tokens
            left_lse = prefix_lse[token, head] if has_prefix else no_lse
            left, right, lse, source = weigh(
                left_lse, suffix_lse[token, head], to_natural, from_natural
            )
            scale = inverse_of(output_scale)
            for i in range(cuda.threadIdx.x, prefix.shape[2], cuda.blockDim.x):
                s = suffix[token, head, i]
                p = prefix[token, head, i] if has_prefix else s
                if source == BOTH:
                    out[token, head, i] = mixed(left, right, p, s, scale)
                elif source == NEITHER:
                    out[token, head, i] = nothing
                elif source == PREFIX:
                    out[token, head, i] = alone(p, scale)
                else:
                    out[token, head, i] = alone(s, scale)
        cuda.syncthreads()  # all have read the row's LSEs, one of which out_lse may be
        if out_lse.shape[0] > 0 and token < prefix.shape[0] and cuda.threadIdx.x == 0:
            out_lse[token, head] = lse

    return merge_vector


@lse_merge.variant("numba_vector", kind="numba", preference=8)
def numba_vector(
    prefix: Any, suffix: Any, out: Any, lse_layout: str, context_tokens: int, **arguments: Any
) -> None:
    """Part of a warp a row, in 8-byte words where rows allow, decoded and rounded in registers."""
    tokens, heads, head_dim = prefix.shape
    if not tokens * heads:
        return
    elements = vector_elements(prefix, suffix, out, limit=WORD_BYTES)
    lanes = lanes_for(head_dim // elements)
    prefix_lse, suffix_lse, out_lse = lses_by_token(arguments, lse_layout)
    numba_target.launch(
        _kernel(prefix.dtype, out.dtype, elements),
        -(-tokens * heads * lanes // THREADS),
        (lanes, THREADS // lanes),
        in_words(prefix, elements),
        prefix_lse,
        in_words(suffix, elements),
        suffix_lse,
        in_words(out, elements),
        out_lse,
        *scalars(arguments, out),
        np.int64(context_tokens),
    )


def in_words(array: Any, elements: int) -> Any:
    """A view of the rows as unsigned words of so many elements."""
    return array.view(np.dtype(f"u{elements * array.dtype.itemsize}"))
