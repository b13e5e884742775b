"""Device functions for Numba kernels: the values of packed cache rows, by `CacheFormat.decode`.

Rows come as three views of the same `[blocks, block_size, bytes]` array, see `row_views`.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from sandbox.cache_formats import E4M3, E5M2, FORMATS, CacheFormat, Widths
from sandbox.cache_formats.ds_mla import BFLOAT16, TILE
from sandbox.kernels.numba_fp8 import fp8_decode
from sandbox.kernels.numba_math import decode, encode
from sandbox.kernels.numba_target import cuda


def row_views(rows: Any, fmt: CacheFormat, count: int, k_scale: Any) -> tuple[Any, Any, Any]:
    """Codes in words of `count` values, 16-bit keys, float32 scales; rows of bytes for what a
    format does not have, and `k_scale` for one scale of all rows."""
    codes = rows.view(np.dtype(f"u{max(1, count * code_bits(fmt) // 8)}"))
    keys = rows.view(np.uint16) if fmt.tile_scales else rows
    return codes, keys, k_scale if fmt.needs_scale else rows.view(np.float32)


def code_bits(fmt: CacheFormat) -> int:
    return 4 if fmt.name == "int4_per_token" else 8


@functools.cache
def code_value(fmt: CacheFormat) -> Any:
    """Device function `code -> float32`."""
    if "fp8" in fmt.name:
        return fp8_decode(E5M2 if fmt.name == "fp8_e5m2" else E4M3)
    sign = np.int32(1 << (code_bits(fmt) - 1))

    @cuda.jit(device=True)
    def integer(code):
        return np.float32((np.int32(code) ^ sign) - sign)

    return integer


@functools.cache
def scale_at(fmt: CacheFormat, widths: Widths) -> Any:
    """Device function `(scales, block, offset, column) -> float32`."""
    latent = widths.L
    if fmt.needs_scale:

        @cuda.jit(device=True)
        def of_all(scales, block, offset, column):
            return scales[0]

        return of_all
    first = next(f.offset for f in fmt.layout(widths) if f.dtype == np.float32) // 4
    if fmt.tile_scales:

        @cuda.jit(device=True)
        def of_tile(scales, block, offset, column):
            return scales[block, offset, first + column // TILE]

        return of_tile

    @cuda.jit(device=True)
    def of_part(scales, block, offset, column):
        return scales[block, offset, first + (1 if column >= latent else 0)]

    return of_part


@functools.cache
def restorer(cache_format: str, widths: Widths, dtype: np.dtype, count: int) -> Any:
    """Device function `(codes, keys, scales, block, offset, piece, out, row)`.

    It writes `out[row, piece]`, a word of `count` elements of `dtype`, at most 8 bytes. A word lies
    in one field.
    """
    fmt = FORMATS[cache_format]
    latent, tiled = widths.L, bool(fmt.tile_scales)
    bits, in_word = code_bits(fmt), max(count, 8 // code_bits(fmt))
    mask = np.uint32((1 << bits) - 1)
    first_key = fmt.fields(widths)["k_pe"].offset // 2
    word_kind, element_bits = np.dtype(f"u{count * dtype.itemsize}").type, 8 * dtype.itemsize
    value_of, scale_of, to_element = code_value(fmt), scale_at(fmt, widths), encode(dtype)
    key_value = decode(BFLOAT16)

    @cuda.jit(device=True)
    def restore(codes, keys, scales, block, offset, piece, out, row):
        column = piece * count
        is_key = tiled and column >= latent
        codes_word, scale = np.uint32(0), np.float32(0)
        if not is_key:
            codes_word = np.uint32(codes[block, offset, column // in_word])
            scale = scale_of(scales, block, offset, column)
        word = word_kind(0)
        for i in range(count):
            if is_key:
                value = key_value(keys[block, offset, first_key + column - latent + i])
            else:
                place = np.uint32((column + i) % in_word * bits)
                value = np.float32(value_of((codes_word >> place) & mask) * scale)
            word |= word_kind(to_element(value)) << word_kind(i * element_bits)
        out[row, piece] = word

    return restore


@functools.cache
def copier() -> Any:
    """Device function like a `restorer`'s, that copies words as they are."""

    @cuda.jit(device=True)
    def copy(codes, keys, scales, block, offset, piece, out, row):
        out[row, piece] = codes[block, offset, piece]

    return copy
