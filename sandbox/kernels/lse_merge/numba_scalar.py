"""Merge of two states in Numba, a block a row and a thread an element."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from sandbox.kernels import numba_target
from sandbox.kernels.lse_merge import lse_merge
from sandbox.kernels.lse_merge.conventions import by_token
from sandbox.kernels.lse_merge.launch import base_factors
from sandbox.kernels.numba_math import from_float32, to_float32
from sandbox.kernels.numba_target import cuda

MAX_THREADS = 128
BOTH, PREFIX, SUFFIX, NEITHER = range(4)


@functools.cache
def weigher() -> Any:
    """Device function: weights of prefix and suffix, the merged LSE, and what the row is made of.

    An empty side is never multiplied, since it may hold NaN.
    """
    one, no_lse = np.float32(1), np.float32(-np.inf)

    @cuda.jit(device=True)
    def weigh(prefix_lse, suffix_lse, to_natural, from_natural):
        no_prefix, no_suffix = math.isinf(prefix_lse), math.isinf(suffix_lse)
        if no_prefix and no_suffix:
            return one, one, no_lse, NEITHER
        if no_prefix and not math.isnan(suffix_lse):
            return one, one, suffix_lse, SUFFIX
        if no_suffix and not math.isnan(prefix_lse):
            return one, one, prefix_lse, PREFIX
        prefix_leads = prefix_lse >= suffix_lse
        gap = suffix_lse - prefix_lse if prefix_leads else prefix_lse - suffix_lse
        less = np.float32(math.exp(gap * to_natural))
        total = one + less
        top = prefix_lse if prefix_leads else suffix_lse
        lse = top + np.float32(math.log(total)) * from_natural
        if prefix_leads:
            return one / total, less / total, lse, BOTH
        return less / total, one / total, lse, BOTH

    return weigh


@functools.cache
def _kernel(dtype: np.dtype) -> Any:
    weigh, to_float, from_float = weigher(), to_float32(dtype), from_float32(dtype)
    zero = np.float32(0)

    @cuda.jit
    def merge_scalar(
        prefix, prefix_lse, suffix, suffix_lse, out, out_lse, to_natural, from_natural
    ):
        token = cuda.blockIdx.x // prefix.shape[1]
        head = cuda.blockIdx.x % prefix.shape[1]
        left, right, lse, source = weigh(
            prefix_lse[token, head], suffix_lse[token, head], to_natural, from_natural
        )
        for i in range(cuda.threadIdx.x, prefix.shape[2], cuda.blockDim.x):
            if source == BOTH:
                value = left * to_float(prefix[token, head, i])
                out[token, head, i] = from_float(value + right * to_float(suffix[token, head, i]))
            elif source == PREFIX:
                out[token, head, i] = prefix[token, head, i]
            elif source == SUFFIX:
                out[token, head, i] = suffix[token, head, i]
            else:
                out[token, head, i] = from_float(zero)
        cuda.syncthreads()  # all have read the row's LSEs, one of which out_lse may be
        if out_lse.shape[0] > 0 and cuda.threadIdx.x == 0:
            out_lse[token, head] = lse

    return merge_scalar


@lse_merge.variant("numba_scalar", kind="numba", preference=5)
def numba_scalar(prefix: Any, suffix: Any, out: Any, lse_layout: str, **arguments: Any) -> None:
    """A block a row, a thread an element."""
    tokens, heads, head_dim = prefix.shape
    prefix_lse, suffix_lse, out_lse = lses_by_token(arguments, lse_layout)
    numba_target.launch(
        _kernel(prefix.dtype),
        tokens * heads,
        min(head_dim, MAX_THREADS),
        prefix,
        prefix_lse,
        suffix,
        suffix_lse,
        out,
        out_lse,
        *map(np.float32, base_factors(arguments)),
    )


def lses_by_token(arguments: dict[str, Any], layout: str) -> list[Any]:
    """The LSEs of prefix, suffix and out as views `[T, N]`; an absent one is empty."""
    prefix_lse, suffix_lse = arguments["prefix_lse"], arguments["suffix_lse"]
    out_lse = present(arguments["out_lse"], prefix_lse)
    return [by_token(lse, layout) for lse in (prefix_lse, suffix_lse, out_lse)]


def present(out_lse: Any, other: Any) -> Any:
    """`out_lse`, or for None, which Numba's kernels cannot test, an empty array like `other`."""
    return other[:0, :0] if out_lse is None else out_lse
