"""What quantized values are worth: the reader's side of the three ops, for NumPy and CuPy arrays.

Each product is one float32 product, so that what a kernel that reads the codes sees is known
exactly, and with it what quantizing costs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sandbox import arrays
from sandbox.cache_formats import E4M3
from sandbox.kernels.quantize import e2m1


def dequantize_static(codes: Any, scale: Any) -> Any:
    """float32 `[T, W]`: each E4M3 code times `scale`, a number or a float32 array of one."""
    return E4M3.decode(codes) * _descale(scale, codes)


def dequantize_groups(codes: Any, scales: Any) -> Any:
    """float32 `[T, W]`: each E4M3 code times its group's scale.

    Args:
        codes: uint8 `[T, W]`.
        scales: float32 `[T, G]`, any strides, one for each `W / G` codes.

    Raises:
        ValueError: the shapes do not go together.
    """
    size = _group_size(codes.shape[0], codes.shape[1], scales)
    groups = E4M3.decode(codes).reshape(*scales.shape, size)
    return (groups * scales[..., None]).reshape(codes.shape)


def dequantize_nvfp4(packed: Any, scales: Any, global_scale: Any) -> Any:
    """float32 `[T, W]`: each E2M1 code times `block scale * global_scale`, itself a product.

    Args:
        packed: uint8 `[T, W / 2]`, the first of two codes in the low bits.
        scales: uint8 `[T, W / 16]`, E4M3.
        global_scale: a number, or a float32 array of one element.

    Raises:
        ValueError: the shapes do not go together.
    """
    codes = e2m1.unpack(packed)
    size = _group_size(*codes.shape, scales)
    steps = E4M3.decode(scales) * _descale(global_scale, scales)
    blocks = e2m1.decode(codes).reshape(*scales.shape, size)
    return (blocks * steps[..., None]).reshape(codes.shape)


def _descale(value: Any, like: Any) -> Any:
    return arrays.device_scalar(value, arrays.namespace(like), np.float32)


def _group_size(tokens: int, width: int, scales: Any) -> int:
    if len(scales) != tokens or not scales.shape[1] or width % scales.shape[1]:
        raise ValueError(
            f"scales have shape {tuple(scales.shape)}, expected [{tokens}, groups of {width} codes]"
        )
    return width // scales.shape[1]
