"""Device functions for Numba kernels: cache rows of every format, byte for byte its `encode`.

What all kernels share, and rows written an item a thread: an element, a rotated pair, or all the
values of one scale. `numba_cache_words` writes them in words, a group of threads a row.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from sandbox.cache_formats import E4M3, E5M2, CacheFormat, RowWidths
from sandbox.cache_formats.ds_mla import BFLOAT16, LEAST_POW2, LEAST_RAW, TILE
from sandbox.cache_formats.per_token import LEAST_SCALE
from sandbox.kernels.numba_columns import copier, quotient, rotater, scalar, turner
from sandbox.kernels.numba_math import encode, to_float32
from sandbox.kernels.numba_target import cuda

PER_TENSOR = {"fp8_e4m3": E4M3, "fp8_e5m2": E5M2}
INTEGER_BITS = {"int8_per_token": 8, "int4_per_token": 4}
INFINITY = np.uint32(0x7F800000)
NAN = np.uint32(0x7FC00000).view(np.float32)


def code_bits(fmt: CacheFormat) -> int:
    """Bits of a code of a packed format."""
    return INTEGER_BITS.get(fmt.name, 8)


def scale_count(fmt: CacheFormat, widths: RowWidths) -> int:
    """How many scales a row of the format holds."""
    return 2 if fmt.name in INTEGER_BITS else widths.L // TILE if fmt.tile_scales else 0


@functools.cache
def row_finder() -> Any:
    """Device function: `(block, offset)` of a token's row, negative where it writes none."""

    @cuda.jit(device=True)
    def find(token, slot_mapping, cache):
        block_size = cache.shape[1]
        if token >= slot_mapping.shape[0]:
            return -1, -1
        slot = slot_mapping[token]
        if slot < 0 or slot >= cache.shape[0] * block_size:
            return -1, -1
        return slot // block_size, slot % block_size

    return find


@functools.cache
def coder(fmt: CacheFormat) -> Any:
    """Device function `(value, scale) -> code`; None for a plain format, which has no codes."""
    if not fmt.packed:
        return None
    if fmt.name not in INTEGER_BITS:
        return quotient(PER_TENSOR.get(fmt.name, E4M3))
    # Adding 1.5 * 2^23 rounds to a whole number, whose two's complement is in the low bits.
    whole = np.float32(1.5 * 2.0**23)
    mask = np.uint32((1 << code_bits(fmt)) - 1)

    @cuda.jit(device=True)
    def integer(value, scale):
        if scale != scale:
            return np.uint8(0)
        rounded = np.float32(np.float32(value / scale) + whole)
        return np.uint8(rounded.view(np.uint32) & mask)

    return integer


@functools.cache
def peak(fmt: CacheFormat) -> Any:
    """Device function `(x, y, peak) -> peak`: bits of the largest magnitude that a scale counts.

    Magnitudes are compared as integers, above which infinities and NaNs stand.
    """
    finite_only = bool(fmt.tile_scales)

    @cuda.jit(device=True)
    def larger(value, most):
        bits = np.uint32(np.float32(value).view(np.uint32) & np.uint32(0x7FFFFFFF))
        if finite_only and bits >= INFINITY:
            return most
        return bits if bits > most else most

    @cuda.jit(device=True)
    def largest(x, y, most):
        return larger(y, larger(x, most))

    return largest


@functools.cache
def scaler(fmt: CacheFormat, tile_scale: str | None) -> Any:
    """Device function: peak to float32 scale, of a tile, or of a token's latent or key."""
    if fmt.name in INTEGER_BITS:
        least, largest = LEAST_SCALE, np.float32((1 << (code_bits(fmt) - 1)) - 1)
        power_of_two = False
    else:
        power_of_two = tile_scale == "pow2"
        least, largest = LEAST_POW2 if power_of_two else LEAST_RAW, np.float32(E4M3.largest)

    @cuda.jit(device=True)
    def scale_of(most):
        if most >= INFINITY:
            return NAN
        scale = np.float32(np.uint32(most).view(np.float32) / largest)
        if scale < least:
            scale = least
        if power_of_two:  # the least that is not below
            bits = scale.view(np.uint32)
            exponent = np.uint32(bits >> np.uint32(23))
            if bits & np.uint32(0x7FFFFF):
                exponent = np.uint32(exponent + np.uint32(1))
            scale = np.uint32(exponent << np.uint32(23)).view(np.float32)
        return scale

    return scale_of


@functools.cache
def bf16_pair() -> Any:
    """Device function `(x, y) -> uint32`: two float32 as bf16, the first in the low half."""
    to_bf16 = encode(BFLOAT16)

    @cuda.jit(device=True)
    def join(x, y):
        return np.uint32(np.uint32(to_bf16(x)) | np.uint32(np.uint32(to_bf16(y)) << np.uint32(16)))

    return join


@functools.cache
def pieces_writer(unit: int) -> Any:
    """Device function: 32 bits into a row, whose elements are `unit` bytes, from `column` on."""
    count, kind = 4 // unit, np.dtype(f"u{unit}").type

    @cuda.jit(device=True)
    def put(cache, place, column, bits):
        block, offset = place
        for i in range(count):
            cache[block, offset, column + i] = kind(np.uint32(bits >> np.uint32(8 * unit * i)))

    return put


def item_count(fmt: CacheFormat, widths: RowWidths) -> int:
    """Items of a row for `item_writer`."""
    pairs = widths.R // 2
    if fmt.tile_scales:
        return scale_count(fmt, widths) + pairs
    return scale_count(fmt, widths) or widths.L + pairs


@functools.cache
def item_writer(
    fmt: CacheFormat, widths: RowWidths, dtype: np.dtype, tile_scale: str | None
) -> Any:
    """Device function `(cache, place, item, token, rows, table)`: item number `item` of a row.

    `place` is the row's `(block, offset)`, `rows` `(kv_c, k_pe, k_scale)` and `table`
    `(positions, cos_sin)`; kv_c and k_pe are of `dtype`, a packed cache is bytes.
    """
    if fmt.tile_scales:
        return _tiled_item(fmt, widths, dtype, tile_scale)
    if fmt.name in INTEGER_BITS:
        return _per_token_item(fmt, widths, dtype)
    copy, turn = copier(dtype, coder(fmt)), turner(dtype, coder(fmt))
    number, latent = scalar(), widths.L

    @cuda.jit(device=True)
    def write(cache, place, item, token, rows, table):
        block, offset = place
        kv_c, k_pe, k_scale = rows
        scale = number(k_scale)
        if item < latent:
            cache[block, offset, item] = copy(kv_c[token, item], scale)
        else:
            pair = item - latent
            x, y = k_pe[token, 2 * pair], k_pe[token, 2 * pair + 1]
            x, y = turn(x, y, scale, pair, token, table)
            cache[block, offset, latent + 2 * pair] = x
            cache[block, offset, latent + 2 * pair + 1] = y

    return write


def _pair_reader(dtype: np.dtype, turned: bool) -> Any:
    """Device function: a token's float32 pair number `pair` of the latent, or of the key."""
    to, rotate = to_float32(dtype), rotater()

    @cuda.jit(device=True)
    def read(values, pair, token, table):
        x, y = to(values[token, 2 * pair]), to(values[token, 2 * pair + 1])
        return rotate(x, y, pair, token, table) if turned else (x, y)

    return read


def _scaled_writer(fmt: CacheFormat, dtype: np.dtype, turned: bool, tile_scale: str | None) -> Any:
    """Device function: the scale of `pairs` pairs from `first` on, at byte `scale_column`, and
    their codes, where the code of pair 0 has its place at byte `column`."""
    read, largest, scale_of = _pair_reader(dtype, turned), peak(fmt), scaler(fmt, tile_scale)
    code, put, packs = coder(fmt), pieces_writer(1), code_bits(fmt) == 4

    @cuda.jit(device=True)
    def write(cache, place, column, scale_column, values, first, pairs, token, table):
        block, offset = place
        most = np.uint32(0)
        for pair in range(first, first + pairs):
            x, y = read(values, pair, token, table)
            most = largest(x, y, most)
        scale = scale_of(most)
        put(cache, place, scale_column, scale.view(np.uint32))
        for pair in range(first, first + pairs):
            x, y = read(values, pair, token, table)
            low, high = code(x, scale), code(y, scale)
            if packs:
                cache[block, offset, column + pair] = np.uint8(low | (high << np.uint8(4)))
            else:
                cache[block, offset, column + 2 * pair] = low
                cache[block, offset, column + 2 * pair + 1] = high

    return write


def _tiled_item(
    fmt: CacheFormat, widths: RowWidths, dtype: np.dtype, tile_scale: str | None
) -> Any:
    """Items are tiles, then pairs of the key."""
    fields = fmt.fields(widths)
    scales, keys = fields["kv_c_scales"].offset, fields["k_pe"].offset
    tiles, pairs = scale_count(fmt, widths), TILE // 2
    write_tile, read_key = _scaled_writer(fmt, dtype, False, tile_scale), _pair_reader(dtype, True)
    join, put = bf16_pair(), pieces_writer(1)

    @cuda.jit(device=True)
    def write(cache, place, item, token, rows, table):
        if item < tiles:
            scale, first = scales + 4 * item, pairs * item
            write_tile(cache, place, 0, scale, rows[0], first, pairs, token, table)
        else:
            pair = item - tiles
            x, y = read_key(rows[1], pair, token, table)
            put(cache, place, keys + 4 * pair, join(x, y))

    return write


def _per_token_item(fmt: CacheFormat, widths: RowWidths, dtype: np.dtype) -> Any:
    """Items are the latent and the key."""
    fields = fmt.fields(widths)
    key, scale, key_scale = (fields[name].offset for name in ("k_pe", "kv_c_scale", "k_pe_scale"))
    latents, keys = widths.L // 2, widths.R // 2
    write_latent, write_key = (_scaled_writer(fmt, dtype, turned, None) for turned in (False, True))

    @cuda.jit(device=True)
    def write(cache, place, item, token, rows, table):
        if item == 0:
            write_latent(cache, place, 0, scale, rows[0], 0, latents, token, table)
        else:
            write_key(cache, place, key, key_scale, rows[1], 0, keys, token, table)

    return write
