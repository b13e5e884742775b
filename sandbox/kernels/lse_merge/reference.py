"""The oracle of both merges: one softmax over all states, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sandbox import arrays
from sandbox.cache_formats import E4M3
from sandbox.kernels.lse import NATURAL, by_token


def lse_merge(
    prefix: Any,
    prefix_lse: Any,
    suffix: Any,
    suffix_lse: Any,
    out: Any,
    out_lse: Any,
    return_lse: bool,
    lse_base: str,
    lse_layout: str,
    output_scale: Any,
    context_tokens: int,
) -> dict[str, Any]:
    xp = arrays.namespace(prefix)
    lses = xp.stack([prefix_lse, suffix_lse])
    by_token(lses, lse_layout)[0, context_tokens:] = -np.inf
    return _softmax(xp, [prefix, suffix], lses, lse_base, lse_layout, output_scale)


def lse_merge_k(
    partials: Any,
    lses: Any,
    out: Any,
    out_lse: Any,
    out_dtype: Any,
    return_lse: bool,
    lse_base: str,
    lse_layout: str,
    output_scale: Any,
) -> dict[str, Any]:
    xp = arrays.namespace(partials)
    return _softmax(xp, partials, lses, lse_base, lse_layout, output_scale)


def _softmax(
    xp: Any, states: Sequence[Any], lses: Any, base: str, layout: str, output_scale: Any
) -> dict[str, Any]:
    lses = by_token(lses, layout).astype(np.float64)
    empty = xp.isinf(lses)
    lses = xp.where(empty, -np.inf, lses)
    top = xp.max(xp.where(xp.isfinite(lses), lses, -np.inf), axis=0)
    top = xp.where(xp.isfinite(top), top, 0.0)
    weights = xp.exp((lses - top) * NATURAL[base])
    total = weights.sum(axis=0)
    nobody = total == 0
    divisor = xp.where(nobody, 1.0, total)[..., None]
    merged = xp.full(states[0].shape, -0.0)  # -0 + x is x, the sign of a zero too
    with np.errstate(invalid="ignore"):
        for state, weight, none in zip(states, weights, empty):
            term = weight[..., None] * state.astype(np.float64)
            merged += xp.where(none[..., None], -0.0, term)
    merged = merged / divisor
    if output_scale is not None:
        merged = E4M3.quantize(merged, output_scale)
    merged = xp.where(nobody[..., None], merged.dtype.type(0), merged)
    lse = top + xp.log(xp.where(nobody, 1.0, total)) / NATURAL[base]
    lse = xp.where(nobody, -np.inf, lse)
    return {"out": merged, "out_lse": by_token(lse, layout)}
