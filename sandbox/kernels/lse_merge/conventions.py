"""How an LSE is written: its base and the order of its axes."""

from __future__ import annotations

import math
from typing import Any

NATURAL = {"e": 1.0, "2": math.log(2.0)}
"""What turns an LSE of each base into a natural logarithm."""

LAYOUTS = {"NT": ("heads", "tokens"), "TN": ("tokens", "heads")}


def lse_shape(state_shape: tuple[int, ...], layout: str) -> tuple[int, int]:
    """Shape of the LSE of a state `[T, N, V]`."""
    tokens, heads, _ = state_shape
    return (heads, tokens) if layout == "NT" else (tokens, heads)


def by_token(lse: Any, layout: str) -> Any:
    """The LSE with tokens before heads in its last two axes: a view."""
    return lse.swapaxes(-1, -2) if layout == "NT" else lse
