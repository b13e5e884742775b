"""The norm as a torch user would write it."""

from __future__ import annotations

from typing import Any

from sandbox import arrays
from sandbox.kernels.rms_norm import rms_norm


@rms_norm.variant("torch", kind="torch", baseline=True, preference=1)
def torch_norm(x: Any, weight: Any, eps: float, out: Any) -> None:
    """Mean square, root and product in float32, then the product with the weight."""
    import torch

    rows, factors, result = map(arrays.to_torch, (x, weight, out))
    values = rows.float()
    scaled = values * torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + eps)
    result.copy_(factors * scaled.to(rows.dtype))
