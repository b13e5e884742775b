"""`int8_per_token` and `int4_per_token`: symmetric integers, latent and key each with a descale.

A row is the latent's codes, the key's codes, the latent's float32 scale, the key's float32 scale:
584 bytes in int8 and 296 in int4 for L = 512, R = 64. Two int4 codes share a byte, the value of
even column in the low nibble, each in two's complement.

`scale = max(amax / largest, FLT_MIN)` over the latent's (the key's) values, with largest 127 or 7;
`code = round(value / scale)` to nearest even, an IEEE float32 quotient, within `-largest` and
`largest`; read = code * scale. Integers have no NaN and no infinity: a latent (a key) that holds
one has a NaN for its scale and codes 0, so that all of it reads NaN and nothing is hidden.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sandbox import arrays
from sandbox.cache_formats.format import CacheFormat, Field, RowWidths, split

FLOAT32 = np.dtype(np.float32)
LEAST_SCALE = np.finfo(np.float32).tiny


def _quantize(values: Any, largest: int) -> tuple[Any, Any]:
    """int8 codes of float32 `[..., n]` and their scales `[..., 1]`."""
    xp = arrays.namespace(values)
    nothing = xp.zeros((*values.shape[:-1], 1), np.float32)
    amax = xp.concatenate([nothing, xp.abs(values)], axis=-1).max(axis=-1, keepdims=True)
    scale = xp.maximum(amax / np.float32(largest), LEAST_SCALE)
    scale = xp.where(xp.isfinite(amax), scale, np.float32(np.nan))
    codes = xp.clip(xp.rint(values / scale), -largest, largest)
    codes = xp.where(xp.isnan(scale), np.float32(0), codes)
    return codes.astype(np.int8), scale


def _encode(rows: Any, dims: RowWidths, largest: int, pack: Any) -> Any:
    xp = arrays.namespace(rows)
    with np.errstate(all="ignore"):
        parts = [_quantize(part, largest) for part in split(rows, dims)]
    codes = [pack(code) for code, _ in parts]
    scales = xp.concatenate([scale for _, scale in parts], axis=-1).view(np.uint8)
    return xp.concatenate([*codes, scales], axis=-1)


def _decode(stored: Any, dims: RowWidths, code_bytes: int, unpack: Any) -> Any:
    xp = arrays.namespace(stored)
    codes = unpack(stored[..., :code_bytes]).astype(np.float32)
    scales = xp.ascontiguousarray(stored[..., code_bytes:]).view(np.float32)
    latent, key = codes[..., : dims.L], codes[..., dims.L :]
    with np.errstate(all="ignore"):
        return xp.concatenate([latent * scales[..., :1], key * scales[..., 1:]], axis=-1)


def _pack4(codes: Any) -> Any:
    nibbles = codes.view(np.uint8) & np.uint8(0xF)
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << np.uint8(4))


def _unpack4(stored: Any) -> Any:
    xp = arrays.namespace(stored)
    nibbles = xp.stack([stored & np.uint8(0xF), stored >> np.uint8(4)], axis=-1)
    nibbles = nibbles.reshape(*stored.shape[:-1], 2 * stored.shape[-1]).astype(np.int8)
    return xp.where(nibbles > 7, nibbles - np.int8(16), nibbles)


def _layout(code: np.dtype, values_a_byte: int) -> Any:
    def layout(dims: RowWidths) -> tuple[Field, ...]:
        latent = Field("kv_c", 0, code, dims.L // values_a_byte)
        key = Field("k_pe", latent.nbytes, code, dims.R // values_a_byte)
        return (
            latent,
            key,
            Field("kv_c_scale", latent.nbytes + key.nbytes, FLOAT32, 1),
            Field("k_pe_scale", latent.nbytes + key.nbytes + 4, FLOAT32, 1),
        )

    return layout


def _refuses4(dims: RowWidths) -> str | None:
    if dims.L % 2 or dims.R % 2:
        return "L and R must be even, two codes share a byte"
    if (dims.L + dims.R) % 8:
        return "L + R must be a multiple of 8, so that the scales are aligned"
    return None


INT8_PER_TOKEN = CacheFormat(
    name="int8_per_token",
    storage=np.dtype(np.uint8),
    layout=_layout(np.dtype(np.int8), 1),
    encode_row=lambda rows, dims: _encode(rows, dims, 127, lambda codes: codes.view(np.uint8)),
    decode_row=lambda stored, dims: _decode(
        stored, dims, dims.L + dims.R, lambda codes: codes.view(np.int8)
    ),
    alignment=4,
    refuses=lambda dims: (
        "L + R must be a multiple of 4, so that the scales are aligned"
        if (dims.L + dims.R) % 4
        else None
    ),
)

INT4_PER_TOKEN = CacheFormat(
    name="int4_per_token",
    storage=np.dtype(np.uint8),
    layout=_layout(np.dtype(np.uint8), 2),
    encode_row=lambda rows, dims: _encode(rows, dims, 7, _pack4),
    decode_row=lambda stored, dims: _decode(stored, dims, (dims.L + dims.R) // 2, _unpack4),
    alignment=4,
    refuses=_refuses4,
)
