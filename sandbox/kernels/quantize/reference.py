"""The oracles: every code and every scale as the contract has it, in float32."""

from __future__ import annotations

from typing import Any

import numpy as np

from sandbox import arrays
from sandbox.cache_formats import E4M3
from sandbox.cache_formats.ds_mla import power_of_two_not_below
from sandbox.kernels.quantize import e2m1

BLOCK = 16
"""Values of quantize_nvfp4 that share a scale."""
LEAST_AMAX = np.float32(1e-10)
"""What the largest magnitude of a group is raised to."""


def quantize_static(x: Any, scale: Any, out: Any) -> dict[str, Any]:
    return {"out": E4M3.quantize(x, scale)}


def quantize_groups(
    x: Any, group_size: int, scale_format: str, scale_layout: str, out: Any, out_scales: Any
) -> dict[str, Any]:
    xp = arrays.namespace(x)
    groups = _groups(x, group_size)
    scales = xp.maximum(finite_amax(groups), LEAST_AMAX) / np.float32(E4M3.largest)
    if scale_format == "ue8m0":
        scales = power_of_two_not_below(scales)
    with np.errstate(all="ignore"):
        codes = E4M3.encode(groups / scales[..., None])
    return {"out": codes.reshape(x.shape), "out_scales": scales}


def quantize_nvfp4(x: Any, global_scale: Any, out: Any, out_scales: Any) -> dict[str, Any]:
    xp = arrays.namespace(x)
    blocks = _groups(x, BLOCK)
    with np.errstate(all="ignore"):
        scales = E4M3.encode(finite_amax(blocks) / e2m1.LARGEST / global_scale)
        divisors = (E4M3.decode(scales) * global_scale)[..., None]
        quotients = xp.where(divisors == 0, np.float32(0), blocks / divisors)
    packed = e2m1.pack(e2m1.encode(quotients))
    return {"out": packed.reshape(x.shape[0], x.shape[1] // 2), "out_scales": scales}


def finite_amax(groups: Any) -> Any:
    """The largest magnitude of the finite values of the last axis, 0 where there is none."""
    xp = arrays.namespace(groups)
    return xp.where(xp.isfinite(groups), xp.abs(groups), np.float32(0)).max(axis=-1)


def _groups(x: Any, size: int) -> Any:
    """float32 `[T, groups, size]`."""
    return x.astype(np.float32).reshape(x.shape[0], x.shape[1] // size, size)
