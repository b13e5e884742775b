"""Both merges as a torch user would write them."""

from __future__ import annotations

import math
from typing import Any

from sandbox import arrays
from sandbox.kernels.lse_merge import lse_merge, lse_merge_k
from sandbox.kernels.lse_merge.conventions import NATURAL, by_token


@lse_merge.variant("torch", kind="torch", baseline=True, preference=1)
def torch_merge(
    prefix: Any,
    prefix_lse: Any,
    suffix: Any,
    suffix_lse: Any,
    out: Any,
    out_lse: Any,
    lse_base: str,
    lse_layout: str,
    **_: Any,
) -> None:
    """Softmax of the two LSEs, weighted sum, and a choice where a side is empty."""
    import torch

    left, right, result = map(arrays.to_torch, (prefix, suffix, out))
    lses = [arrays.to_torch(by_token(lse, lse_layout)) for lse in (prefix_lse, suffix_lse)]
    weights, lse = _softmax(torch.stack(lses), NATURAL[lse_base])
    mixed = weights[0, ..., None] * left.float() + weights[1, ..., None] * right.float()
    no_left, no_right = (lse.isinf()[..., None] for lse in lses)
    known = ~lse.isnan()[..., None]
    merged = torch.where(no_left & known, right, mixed.to(right.dtype))
    merged = torch.where(no_right & known, left, merged)
    result.copy_(torch.where(no_left & no_right, torch.zeros_like(merged), merged))
    if out_lse is not None:
        arrays.to_torch(by_token(out_lse, lse_layout)).copy_(lse)


@lse_merge_k.variant("torch", kind="torch", baseline=True, preference=1)
def torch_merge_k(
    partials: Any,
    lses: Any,
    out: Any,
    out_lse: Any,
    lse_base: str,
    lse_layout: str,
    **_: Any,
) -> None:
    """Softmax of all LSEs, then a weighted sum state by state."""
    import torch

    states, result = arrays.to_torch(partials), arrays.to_torch(out)
    stacked = arrays.to_torch(by_token(lses, lse_layout))
    weights, lse = _softmax(stacked, NATURAL[lse_base])
    merged = torch.full(result.shape, -0.0, device=result.device)
    for state, weight, empty in zip(states, weights, stacked.isinf()):
        merged = torch.where(empty[..., None], merged, merged + weight[..., None] * state.float())
    nobody = stacked.isinf().all(dim=0)[..., None]
    result.copy_(torch.where(nobody, torch.zeros_like(merged), merged))
    if out_lse is not None:
        arrays.to_torch(by_token(out_lse, lse_layout)).copy_(lse)


def _softmax(lses: Any, natural: float) -> tuple[Any, Any]:
    """Weights of stacked states and their common LSE; an empty state's weight is 0."""
    lses = lses.masked_fill(lses.isinf(), -math.inf)
    top = lses.amax(dim=0)
    shift = top.masked_fill(top.isinf(), 0.0)
    weights = ((lses - shift) * natural).exp()
    total = weights.sum(dim=0)
    return weights / total.masked_fill(total == 0, 1.0), top + total.log() / natural
