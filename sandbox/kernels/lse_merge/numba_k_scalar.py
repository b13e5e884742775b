"""Merge of stacked states in Numba, a block a row and a thread an element."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from sandbox.kernels import numba_target
from sandbox.kernels.lse import by_token
from sandbox.kernels.lse_merge import lse_merge_k
from sandbox.kernels.lse_merge.numba_merge import rounder, scalars
from sandbox.kernels.numba_columns import array_or_empty, inverse
from sandbox.kernels.numba_math import from_float32, to_float32
from sandbox.kernels.numba_target import cuda

MAX_THREADS = 128


@functools.cache
def summer() -> Any:
    """Device function: largest LSE of a row's states and sum of their weights against it."""
    lowest, zero = np.float32(-np.inf), np.float32(0)

    @cuda.jit(device=True)
    def sum_weights(lses, token, head, to_natural):
        top = lowest
        for k in range(lses.shape[0]):
            lse = lses[k, token, head]
            if not math.isinf(lse) and lse > top:
                top = lse
        total = zero
        for k in range(lses.shape[0]):
            lse = lses[k, token, head]
            if not math.isinf(lse):
                total += np.float32(math.exp((lse - top) * to_natural))
        return top, total

    return sum_weights


@functools.cache
def lse_merger() -> Any:
    """Device function: the LSE of all states from what `summer` gave."""
    no_lse, zero = np.float32(-np.inf), np.float32(0)

    @cuda.jit(device=True)
    def merged(top, total, from_natural):
        if total == zero:
            return no_lse
        return top + np.float32(math.log(total)) * from_natural

    return merged


@functools.cache
def _kernel(dtype: np.dtype, out_dtype: np.dtype) -> Any:
    sum_weights, merged_lse, inverse_of = summer(), lse_merger(), inverse()
    to_float, from_float = to_float32(dtype), rounder(out_dtype, from_float32)
    zero, one, minus_zero = np.float32(0), np.float32(1), np.float32(-0.0)

    @cuda.jit
    def merge_k_scalar(partials, lses, out, out_lse, to_natural, from_natural, output_scale):
        token = cuda.blockIdx.x // out.shape[1]
        head = cuda.blockIdx.x % out.shape[1]
        top, total = sum_weights(lses, token, head, to_natural)
        scale = inverse_of(output_scale)
        for i in range(cuda.threadIdx.x, out.shape[2], cuda.blockDim.x):
            value = minus_zero  # -0 + x is x, the sign of a zero too
            for k in range(lses.shape[0]):
                lse = lses[k, token, head]
                if not math.isinf(lse):
                    weight = np.float32(math.exp((lse - top) * to_natural)) / total
                    value += weight * to_float(partials[k, token, head, i])
            if total == zero:
                out[token, head, i] = from_float(zero, one)
            else:
                out[token, head, i] = from_float(value, scale)
        if out_lse.shape[0] > 0 and cuda.threadIdx.x == 0:
            out_lse[token, head] = merged_lse(top, total, from_natural)

    return merge_k_scalar


@lse_merge_k.variant("numba_scalar", kind="numba", preference=5)
def numba_scalar(
    partials: Any, lses: Any, out: Any, out_lse: Any, lse_layout: str, **arguments: Any
) -> None:
    """A block a row, a thread an element, each walking the states three times."""
    tokens, heads, head_dim = out.shape
    numba_target.launch(
        _kernel(partials.dtype, out.dtype),
        tokens * heads,
        min(head_dim, MAX_THREADS),
        partials,
        by_token(lses, lse_layout),
        out,
        by_token(array_or_empty(out_lse, lses, 2), lse_layout),
        *scalars(arguments, out),
    )
