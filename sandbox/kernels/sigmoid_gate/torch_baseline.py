"""The gate as a torch user would write it."""

from __future__ import annotations

from typing import Any

from sandbox import arrays
from sandbox.kernels.sigmoid_gate import sigmoid_gate


@sigmoid_gate.variant("torch", kind="torch", baseline=True, preference=1)
def torch_gate(x: Any, gate: Any, out: Any) -> None:
    """Sigmoid and product in float32, and a choice where x is 0."""
    import torch

    values, gates, result = map(arrays.to_torch, (x, gate, out))
    gated = (values.float() * gates.float().sigmoid()).to(values.dtype)
    result.copy_(torch.where(values == 0, values, gated))
