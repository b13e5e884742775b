"""The oracle: the product in float64."""

from __future__ import annotations

from typing import Any

import numpy as np


def linear(x: Any, weight: Any, bias: Any, out: Any) -> dict[str, Any]:
    with np.errstate(invalid="ignore"):
        product = x.astype(np.float64) @ weight.astype(np.float64).T
    return {"out": product if bias is None else product + bias.astype(np.float64)}
