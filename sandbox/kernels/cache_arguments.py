"""Checks that every op with a cache shares: its format, its scales, what its rows hold."""

from __future__ import annotations

from typing import Any

import numpy as np

from sandbox import arrays
from sandbox.cache_formats import CacheFormat, Widths
from sandbox.kernels import require

LEAST_SCALE = float(np.finfo(np.float32).tiny)


def scale(value: Any, name: str, like: Any) -> Any:
    """A descale as a float32 array of shape `(1,)` beside the array `like`.

    Numbers, NumPy scalars and arrays of one element are taken; an array may change between calls.
    """
    if value is None:
        raise ValueError(f"{name} is missing: codes are value / {name}")
    return arrays.device_scalar(value, arrays.namespace(like), np.float32, name)


def cache_scale(fmt: CacheFormat, k_scale: Any, cache: Any) -> Any:
    """`k_scale` as `scale` has it, or None for a format without one.

    Raises:
        ValueError: the format needs it and it is missing, or the other way round.
    """
    fmt.check_scales(k_scale)
    return scale(k_scale, "k_scale", cache) if fmt.needs_scale else None


def positive_scales(**scales: Any) -> None:
    """ValueError for a descale that is not a positive, normal float32; None is skipped.

    The reciprocal of a smaller one may be infinite.
    """
    for name, value in scales.items():
        if value is not None and not (LEAST_SCALE <= float(value[0]) < np.inf):
            raise ValueError(f"{name} is {float(value[0])}, expected positive, normal and finite")


def aligned(rows: Any, name: str, fmt: CacheFormat) -> None:
    """Rows whose addresses suit the widest field of the format."""
    places = [arrays.address(rows), *rows.strides[:-1]]
    if rows.size and any(place % fmt.alignment for place in places):
        raise ValueError(
            f"{name} has an address or strides {rows.strides} that are no multiples of "
            f"{fmt.alignment} bytes, which {fmt.name} needs"
        )


def widths(rows: Any, name: str, fmt: CacheFormat, kv_lora_rank: int | None) -> Widths:
    """Latent and key widths of packed rows; per-tensor codes are all alike and need no split."""
    elements = rows.shape[-1]
    if fmt.needs_scale:
        return Widths(elements, 0)
    if kv_lora_rank is None:
        raise ValueError(f"kv_lora_rank is missing: rows of {fmt.name} need it to be read")
    try:
        return fmt.widths(elements, require.integer(kv_lora_rank, "kv_lora_rank", least=1))
    except ValueError as failure:
        raise ValueError(f"{name} has shape {tuple(rows.shape)}: {failure}") from None
