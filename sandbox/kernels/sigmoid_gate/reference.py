"""The oracle, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from sandbox import arrays


def sigmoid_gate(x: Any, gate: Any, out: Any) -> dict[str, Any]:
    xp, values, gates = arrays.namespace(x), x.astype(np.float64), gate.astype(np.float64)
    less = xp.exp(-xp.abs(gates))
    sigmoid = xp.where(gates >= 0, 1.0, less) / (1 + less)
    with np.errstate(invalid="ignore"):
        return {"out": xp.where(values == 0, values, values * sigmoid)}
