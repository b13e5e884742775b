"""The three ops as a torch user would write them."""

from __future__ import annotations

from typing import Any

from sandbox import arrays
from sandbox.kernels.concat_insert.torch_codes import float8
from sandbox.kernels.quantize import e2m1, quantize_groups, quantize_nvfp4, quantize_static
from sandbox.kernels.quantize.reference import BLOCK, LEAST_AMAX


@quantize_static.variant("torch", kind="torch", baseline=True, preference=1)
def torch_static(x: Any, scale: Any, out: Any) -> None:
    """Multiply in float32, clamp, convert."""
    scaled = arrays.to_torch(x).float() * arrays.to_torch(scale).reciprocal()
    arrays.to_torch(out).copy_(float8(scaled, "float8_e4m3fn"))


@quantize_groups.variant("torch", kind="torch", baseline=True, preference=1)
def torch_groups(
    x: Any, group_size: int, scale_format: str, scale_layout: str, out: Any, out_scales: Any
) -> None:
    """The largest magnitude of each group, divide in float32, clamp, convert."""
    import torch

    groups = arrays.to_torch(x).float().unflatten(1, (-1, group_size))
    scales = _quotient(_finite_amax(groups).clamp(min=float(LEAST_AMAX)), 448)
    if scale_format == "ue8m0":
        scales = ((scales.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    codes = float8(groups / scales[..., None], "float8_e4m3fn")
    arrays.to_torch(out).copy_(codes.flatten(1))
    arrays.to_torch(out_scales).copy_(scales)


@quantize_nvfp4.variant("torch", kind="torch", baseline=True, preference=1)
def torch_nvfp4(x: Any, global_scale: Any, out: Any, out_scales: Any) -> None:
    """The largest magnitude of each block, divide in float32, count the ties below."""
    import torch

    blocks = arrays.to_torch(x).float().unflatten(1, (-1, BLOCK))
    descale = arrays.to_torch(global_scale)
    scales = float8(_quotient(_finite_amax(blocks), 6) / descale, "float8_e4m3fn")
    steps = (scales.view(torch.float8_e4m3fn).float() * descale)[..., None]
    codes = _e2m1(torch.where(steps > 0, blocks / steps, 0)).flatten(1)
    arrays.to_torch(out).copy_(codes[:, 0::2] | codes[:, 1::2] << 4)
    arrays.to_torch(out_scales).copy_(scales)


def _finite_amax(groups: Any) -> Any:
    import torch

    return torch.where(groups.isfinite(), groups.abs(), 0).amax(dim=-1)


def _quotient(values: Any, number: int) -> Any:
    """By a tensor: on a GPU torch multiplies by the reciprocal of a Python number."""
    import torch

    return values / torch.full_like(values, number)


def _e2m1(values: Any) -> Any:
    """Codes 0 to 15, uint8; a NaN is 0."""
    import torch

    magnitude = values.abs()
    codes = values.signbit().to(torch.uint8) << 3
    for lower, tie in enumerate(e2m1.TIES.tolist()):
        codes += magnitude >= tie if lower % 2 else magnitude > tie
    return codes.masked_fill(values.isnan(), 0)
