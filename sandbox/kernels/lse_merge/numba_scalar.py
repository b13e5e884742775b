"""Merge of two states in Numba, a block a row and a thread an element."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from sandbox.kernels import numba_target
from sandbox.kernels.lse_merge import lse_merge
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
from sandbox.kernels.numba_columns import copier, inverse
from sandbox.kernels.numba_math import from_float32, to_float32
from sandbox.kernels.numba_target import cuda

MAX_THREADS = 128


@functools.cache
def _kernel(dtype: np.dtype, out_dtype: np.dtype) -> Any:
    weigh, inverse_of = weigher(), inverse()
    to_float, from_float = to_float32(dtype), rounder(out_dtype, from_float32)
    alone = copier(dtype, coder(out_dtype))
    zero, one, no_lse = np.float32(0), np.float32(1), np.float32(-np.inf)

    @cuda.jit
    def merge_scalar(
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
        token = cuda.blockIdx.x // prefix.shape[1]
        head = cuda.blockIdx.x % prefix.shape[1]
        has_prefix = token < context_tokens
        left_lse = prefix_lse[token, head] if has_prefix else no_lse
        left, right, lse, source = weigh(
            left_lse, suffix_lse[token, head], to_natural, from_natural
        )
        scale = inverse_of(output_scale)
        for i in range(cuda.threadIdx.x, prefix.shape[2], cuda.blockDim.x):
            if source == BOTH:
                value = right * to_float(suffix[token, head, i])
                if has_prefix:
                    value += left * to_float(prefix[token, head, i])
                out[token, head, i] = from_float(value, scale)
            elif source == NEITHER:
                out[token, head, i] = from_float(zero, one)
            elif source == PREFIX:
                out[token, head, i] = alone(prefix[token, head, i], scale)
            else:
                out[token, head, i] = alone(suffix[token, head, i], scale)
        cuda.syncthreads()  # all have read the row's LSEs, one of which out_lse may be
        if out_lse.shape[0] > 0 and cuda.threadIdx.x == 0:
            out_lse[token, head] = lse

    return merge_scalar


@lse_merge.variant("numba_scalar", kind="numba", preference=5)
def numba_scalar(
    prefix: Any, suffix: Any, out: Any, lse_layout: str, context_tokens: int, **arguments: Any
) -> None:
    """A block a row, a thread an element."""
    tokens, heads, head_dim = prefix.shape
    prefix_lse, suffix_lse, out_lse = lses_by_token(arguments, lse_layout)
    numba_target.launch(
        _kernel(prefix.dtype, out.dtype),
        tokens * heads,
        min(head_dim, MAX_THREADS),
        prefix,
        prefix_lse,
        suffix,
        suffix_lse,
        out,
        out_lse,
        *scalars(arguments, out),
        np.int64(context_tokens),
    )
