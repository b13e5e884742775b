"""Weights stored as 8-bit codes with a scale for each block of 128 x 128, as DeepSeek-V3's release.

value = code * scale_inv[row // 128, column // 128], in float32, rounded once to bfloat16. The
scales of ``X.weight``, `[ceil(out / 128), ceil(in / 128)]`, are named ``X.weight_scale_inv``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from sandbox import arrays
from sandbox.cache_formats.fp8 import E4M3
from sandbox.layers.weight_sources import StoredTensor

BLOCK = 128
CODE_DTYPES = ("float8_e4m3fn", "uint8")
SCALE_SUFFIX = "_scale_inv"


def restored(codes: StoredTensor, scales: StoredTensor) -> StoredTensor:
    """A tensor of codes as the bfloat16 tensor that it stands for.

    Raises:
        TypeError: `codes` are none, or the scales are no float32.
        ValueError: the scales have another shape.
    """
    if codes.dtype not in CODE_DTYPES:
        raise TypeError(
            f"{codes.name} is {codes.dtype}, but there is {scales.name}: expected E4M3 codes "
            f"({' or '.join(CODE_DTYPES)})"
        )
    if scales.dtype != "float32":
        raise TypeError(f"{scales.name} is {scales.dtype}, expected float32")
    expected = tuple(-(-width // BLOCK) for width in codes.shape)
    if scales.shape != expected:
        raise ValueError(
            f"{scales.name} has shape {scales.shape}, expected {expected}: "
            f"[ceil(out / {BLOCK}), ceil(in / {BLOCK})]"
        )

    def read(part: tuple[slice, ...]) -> Any:
        rows, columns = part
        whole = scales.read((slice(None), slice(None)))
        return dequantize(codes.read(part), whole, rows.start, columns.start)

    return replace(codes, dtype="bfloat16", read=read)


def dequantize(codes: Any, scales: Any, row: int = 0, column: int = 0) -> Any:
    """Codes `[out, in]`, a part of a weight that begins at (`row`, `column`) of it, as bfloat16.

    A band of blocks at a time, so that the float32 values of a large weight are never all there.
    """
    xp = arrays.namespace(codes, scales)
    values = xp.empty(codes.shape, arrays.bfloat16)
    blocks = (column + xp.arange(codes.shape[1])) // BLOCK
    for start in range(-(row % BLOCK), len(codes), BLOCK):
        band = slice(max(start, 0), start + BLOCK)
        scale = scales[(row + start) // BLOCK][blocks]
        with np.errstate(all="ignore"):
            values[band] = (E4M3.decode(codes[band]) * scale).astype(arrays.bfloat16)
    return values
