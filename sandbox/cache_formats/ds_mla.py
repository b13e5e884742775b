"""`fp8_ds_mla`: E4M3 latents in tiles of 128 with a float32 descale each, keys in bfloat16.

A row is `L` codes, `L / 128` float32 tile scales, `R` bfloat16 keys: 656 bytes for L = 512, R = 64.
Tile `t` has the codes `128 t` to `128 t + 127`; stored = value / scale, read = code * scale.

A writer takes scales that are powers of two, `2^ceil(log2(max(amax / 448, 1e-4)))`, since some
readers keep no more than the exponent, or `max(amax / 448, FLT_MIN)` on request. A reader takes any
float32. `amax` is that of the tile's finite values: an infinity saturates, a NaN is a NaN code, and
neither changes what the other values become.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from sandbox import arrays
from sandbox.cache_formats.format import CacheFormat, Field, RowWidths, split
from sandbox.cache_formats.fp8 import E4M3

TILE = 128
LEAST_POW2 = np.float32(1e-4)
LEAST_RAW = np.finfo(np.float32).tiny
FLOAT32, BFLOAT16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)


def layout(dims: RowWidths) -> tuple[Field, ...]:
    scales = Field("kv_c_scales", dims.L, FLOAT32, dims.L // TILE)
    return (
        Field("kv_c", 0, E4M3.dtype, dims.L),
        scales,
        Field("k_pe", dims.L + scales.nbytes, BFLOAT16, dims.R),
    )


def refuses(dims: RowWidths) -> str | None:
    return f"L must be a multiple of {TILE}, the values of a tile" if dims.L % TILE else None


def power_of_two_not_below(values: Any) -> Any:
    """The least power of two that is not below each positive, normal float32."""
    bits = values.view(np.uint32)
    exponent = (bits >> np.uint32(23)) + (bits & np.uint32(0x7FFFFF) != 0)
    return (exponent.astype(np.uint32) << np.uint32(23)).view(np.float32)


def tile_scales(tiles: Any, rule: str) -> Any:
    """Descales of float32 `[..., 128]` by rule `"pow2"` or `"raw"`."""
    xp = arrays.namespace(tiles)
    amax = xp.where(xp.isfinite(tiles), xp.abs(tiles), np.float32(0)).max(axis=-1)
    scales = amax / np.float32(E4M3.largest)
    if rule == "raw":
        return xp.maximum(scales, LEAST_RAW)
    return power_of_two_not_below(xp.maximum(scales, LEAST_POW2))


def encode(rows: Any, dims: RowWidths, tile_scale: str) -> Any:
    xp = arrays.namespace(rows)
    latent, key = split(rows, dims)
    tiles = latent.reshape(*latent.shape[:-1], dims.L // TILE, TILE)
    with np.errstate(all="ignore"):
        scales = tile_scales(tiles, tile_scale)
        codes = E4M3.encode(tiles / scales[..., None]).reshape(latent.shape)
        key = xp.ascontiguousarray(key.astype(BFLOAT16))
    parts = [codes, scales.view(np.uint8), key.view(np.uint8)]
    return xp.concatenate(parts, axis=-1)


def decode(stored: Any, dims: RowWidths) -> Any:
    xp = arrays.namespace(stored)
    codes, scales, key = (
        xp.ascontiguousarray(stored[..., field.offset : field.offset + field.nbytes])
        for field in layout(dims)
    )
    scales = scales.view(np.float32)
    tiles = E4M3.decode(codes).reshape(*codes.shape[:-1], dims.L // TILE, TILE)
    with np.errstate(all="ignore"):
        latent = (tiles * scales[..., None]).reshape(codes.shape)
    return xp.concatenate([latent, key.view(BFLOAT16).astype(np.float32)], axis=-1)


FP8_DS_MLA = CacheFormat(
    name="fp8_ds_mla",
    storage=np.dtype(np.uint8),
    layout=layout,
    encode_row=encode,
    decode_row=decode,
    alignment=4,
    refuses=refuses,
    tile_scales=("pow2", "raw"),
)
