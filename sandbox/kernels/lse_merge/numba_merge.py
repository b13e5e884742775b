"""What the Numba kernels of both merges share: weights, results, absent arguments."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from sandbox.cache_formats import E4M3
from sandbox.kernels.lse import by_token
from sandbox.kernels.lse_merge.launch import base_factors
from sandbox.kernels.numba_columns import array_or_empty, product
from sandbox.kernels.numba_target import cuda

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


def coder(out_dtype: np.dtype) -> Any:
    """Device function `(float32, inverse) -> code` where results are codes, else None."""
    return product(E4M3) if out_dtype == np.uint8 else None


@functools.cache
def rounder(out_dtype: np.dtype, convert: Callable[[np.dtype], Any]) -> Any:
    """Device function `(float32, inverse) -> result`: `coder`'s, or `convert(out_dtype)`'s."""
    if code := coder(out_dtype):
        return code
    from_float = convert(out_dtype)

    @cuda.jit(device=True)
    def rounded(value, inverse):
        return from_float(value)

    return rounded


def lses_by_token(arguments: Mapping[str, Any], layout: str) -> list[Any]:
    """The LSEs of prefix, suffix and out as views `[T, N]`; an absent one is empty."""
    prefix_lse, suffix_lse = arguments["prefix_lse"], arguments["suffix_lse"]
    out_lse = array_or_empty(arguments["out_lse"], prefix_lse, 2)
    return [by_token(lse, layout) for lse in (prefix_lse, suffix_lse, out_lse)]


def scalars(arguments: Mapping[str, Any], out: Any) -> tuple[Any, ...]:
    """Factors from and to the LSEs' base, and the descale of codes, empty where there are none."""
    factors = map(np.float32, base_factors(arguments))
    return *factors, array_or_empty(arguments["output_scale"], out)
