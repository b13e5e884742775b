"""How an LSE is written: its base and the order of its axes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from sandbox import arrays
from sandbox.kernels import require

NATURAL = {"e": 1.0, "2": math.log(2.0)}
"""What turns an LSE of each base into a natural logarithm."""

LAYOUTS = {"NT": ("heads", "tokens"), "TN": ("tokens", "heads")}

REQUEST_LAYOUTS = {**LAYOUTS, "BNS": ("requests", "heads", "tokens of a request")}
"""Those of an LSE of `B` requests with `S` tokens each, where `T = B * S`."""


def check_conventions(
    return_lse: Any, out_lse: Any, lse_base: Any, lse_layout: Any, layouts: Iterable[str] = LAYOUTS
) -> None:
    """What a caller says of an op's LSEs.

    Raises:
        TypeError, ValueError: `return_lse` is no bool or against `out_lse`, or the base or the
            layout is none that the op knows.
    """
    require.flag(return_lse, "return_lse")
    if out_lse is not None and not return_lse:
        raise ValueError("out_lse is given, but return_lse is False")
    require.one_of(lse_base, "lse_base", NATURAL)
    require.one_of(lse_layout, "lse_layout", layouts)


def lse_shape(state_shape: tuple[int, ...], layout: str) -> tuple[int, int]:
    """Shape of the LSE of a state `[T, N, V]`."""
    tokens, heads, _ = state_shape
    return (heads, tokens) if layout == "NT" else (tokens, heads)


def by_token(lse: Any, layout: str) -> Any:
    """The LSE with tokens before heads in its last two axes: a view."""
    return lse.swapaxes(-1, -2) if layout == "NT" else lse


def request_lse_shape(state_shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """Shape of the LSE of a state `[B, S, N, V]`."""
    requests, tokens, heads, width = state_shape
    if layout == "BNS":
        return requests, heads, tokens
    return lse_shape((requests * tokens, heads, width), layout)


def by_request(lse: Any, layout: str, requests: int, tokens: int) -> Any:
    """The LSE of `B` requests with `S` tokens as `[B, S, N]`: a view."""
    if layout == "BNS":
        return lse.swapaxes(1, 2)
    flat = by_token(lse, layout)
    step, head = flat.strides
    xp = arrays.namespace(flat)
    shape = (requests, tokens, flat.shape[1])
    return xp.lib.stride_tricks.as_strided(flat, shape, (tokens * step, step, head))
