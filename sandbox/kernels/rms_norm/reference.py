"""The oracle: the norm in float64, but for the rounding before the product with the weight."""

from __future__ import annotations

from typing import Any

import numpy as np

from sandbox import arrays

LARGEST = float(np.finfo(np.float32).max)


def rms_norm(x: Any, weight: Any, eps: float, out: Any) -> dict[str, Any]:
    xp, values = arrays.namespace(x), x.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        squares = (values**2).sum(axis=-1, keepdims=True)
        squares = xp.where(squares > LARGEST, np.inf, squares)  # that sum is a float32
        scaled = values * (1 / xp.sqrt(squares / x.shape[1] + eps))
        normalised = scaled.astype(x.dtype).astype(np.float64)
        return {"out": normalised * weight.astype(np.float64)}
