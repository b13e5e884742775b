"""Both merges as a torch user would write them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from sandbox import arrays
from sandbox.kernels.lse import NATURAL, by_token
from sandbox.kernels.lse_merge import lse_merge, lse_merge_k


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
    output_scale: Any,
    context_tokens: int,
    **_: Any,
) -> None:
    """Softmax of the two LSEs, weighted sum, and a choice where a side is empty."""
    import torch

    left, right, result = map(arrays.to_torch, (prefix, suffix, out))
    lses = [arrays.to_torch(by_token(lse, lse_layout)) for lse in (prefix_lse, suffix_lse)]
    if context_tokens < len(left):
        nothing = torch.full_like(lses[0][context_tokens:], -math.inf)
        lses[0] = torch.cat([lses[0][:context_tokens], nothing])
    weights, lse = _softmax(torch.stack(lses), NATURAL[lse_base])
    mixed = weights[0, ..., None] * left.float() + weights[1, ..., None] * right.float()
    no_left, no_right = (lse.isinf()[..., None] for lse in lses)
    known = ~lse.isnan()[..., None]
    finish = _finisher(output_scale, right.dtype)
    merged = torch.where(no_left & known, finish(right), finish(mixed))
    merged = torch.where(no_right & known, finish(left), merged)
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
    output_scale: Any,
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
    merged = _finisher(output_scale, merged.dtype)(merged)
    result.copy_(torch.where(nobody, torch.zeros_like(merged), merged))
    if out_lse is not None:
        arrays.to_torch(by_token(out_lse, lse_layout)).copy_(lse)


def _finisher(output_scale: Any, dtype: Any) -> Callable[[Any], Any]:
    """What makes results of a tensor: values of `dtype`, or E4M3 codes where there is a scale."""
    import torch

    if output_scale is None:
        return lambda values: values.to(dtype)
    inverse = arrays.to_torch(output_scale).reciprocal()

    def codes(values: Any) -> Any:
        """torch's own conversion neither saturates nor has one code for all NaNs."""
        scaled = values.float() * inverse
        bits = scaled.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        return bits.masked_fill(scaled.isnan(), 0x7F)

    return codes


def _softmax(lses: Any, natural: float) -> tuple[Any, Any]:
    """Weights of stacked states and their common LSE; an empty state's weight is 0."""
    lses = lses.masked_fill(lses.isinf(), -math.inf)
    top = lses.amax(dim=0)
    shift = top.masked_fill(top.isinf(), 0.0)
    weights = ((lses - shift) * natural).exp()
    total = weights.sum(dim=0)
    return weights / total.masked_fill(total == 0, 1.0), top + total.log() / natural
