"""The rows that the conformance vectors are made of: what goes wrong in writers and readers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from sandbox.cache_formats.ds_mla import TILE
from sandbox.cache_formats.format import CacheFormat, RowWidths, Widths
from sandbox.cache_formats.fp8 import E4M3, E5M2, Float8

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DEEPSEEK = Widths(512, 64)
K_SCALES = (1.0, 0.1, 0.3, 0.125, 3.7)

EDGES = (448.0, 449.0, 464.0, 465.0, 480.0, 1000.0, 57344.0, 61440.0, 65536.0, 1e5, 3e38, np.inf)
EDGES += (2.0**-9, 2.0**-10, 1.5 * 2.0**-9, 2.0**-11, 2.0**-6, 1.75 * 2.0**-7, 2.0**-14, 2.0**-16)
EDGES += (2.0**-17, 1.5 * 2.0**-16, 2.0**-18, 2.0**-126, 2.0**-133, 0.0, 1.0625, 1.1875, 1.125)
EDGES += (1.375, 17.0, 19.0, 0.5, 1.5, 2.5, np.nan)
"""Around the largest numbers, the subnormals and the ties of E4M3 and E5M2."""

TILE_SCALES = (1.0, 0.75, 0.1, 1.5 * 2.0**-5, 3.7, 2.0**-13, 1e-4, 2.0**20, 1e30, 2.0**-126)
TILE_SCALES += (1e-41, 0.0, np.inf, np.nan, 255.0 / 256, 1.0 + 2.0**-23)
"""Scales that a writer of some kind could have left: a reader takes any float32."""


def all_bfloat16(dims: RowWidths) -> Any:
    """Every bf16 in the order of its bits, from the first again where the last row has room."""
    width = dims.L + dims.R
    count = -(-65536 // width) * width
    return np.arange(count, dtype=np.uint32).astype(np.uint16).view(BFLOAT16).reshape(-1, width)


def scattered(count: int, dims: RowWidths, reach: int = 40) -> Any:
    """bf16 of either sign between 2^-6 and 4, times 2^-reach to 2^reach by row."""
    place = np.arange(count * (dims.L + dims.R), dtype=np.uint64) + 1
    mixed = (place * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)
    exponent = (mixed >> np.uint64(8) & np.uint64(7)) + np.uint64(121)
    sign, mantissa = mixed >> np.uint64(23), mixed & np.uint64(127)
    bits = (sign << np.uint64(15)) | (exponent << np.uint64(7)) | mantissa
    rows = bits.astype(np.uint16).view(BFLOAT16).reshape(count, -1).astype(np.float32)
    steps = np.rint(np.linspace(-reach, reach, count)) if count > 1 else np.zeros(1)
    return (rows * np.exp2(steps)[:, None].astype(np.float32)).astype(BFLOAT16)


def ties(kind: Float8) -> Any:
    """float32 of both signs: half-way between neighbouring codes, and the floats beside each."""
    codes = np.arange(0x7F if kind is E4M3 else 0x7C, dtype=np.uint8)
    numbers = kind.decode(codes).astype(np.float64)
    half = ((numbers[1:] + numbers[:-1]) / 2).astype(np.float32)
    around = [np.nextafter(half, np.float32(x)) for x in (0, np.inf)]
    found = np.stack([around[0], half, around[1]], axis=1).ravel()
    return np.concatenate([found, -found])


def filled(values: Any, dims: RowWidths, dtype: np.dtype = BFLOAT16) -> Any:
    """As few rows as hold all `values`, in turn, in the latent, and again in the key."""
    parts = []
    count = max(-(-len(values) // width) for width in (dims.L, dims.R) if width)
    for width in (dims.L, dims.R):
        parts.append(np.resize(values, (count, width)))
    with np.errstate(over="ignore"):
        return np.concatenate(parts, axis=1).astype(dtype)


def signed_edges(scale: float = 1.0) -> Any:
    edges = np.asarray(EDGES, np.float32)
    with np.errstate(over="ignore"):
        return np.concatenate([edges, -edges]) * np.float32(scale)


def other_inputs(rows: Any, reach: int = 6) -> Iterator[tuple[str, Widths, Any]]:
    """The scattered rows of DeepSeek's widths and special `rows` in float32 and float16, which are
    other kernels than bf16: values that bf16 does not have, a zero row, NaN, infinities."""
    wide = scattered(5, DEEPSEEK, reach).astype(np.float32) * np.float32(1.001)
    wide[1] = 0
    wide[3, 7], wide[3, -1], wide[4, 300] = np.nan, -np.inf, np.inf
    dims, special = rows
    for dtype in (np.float32, np.float16):
        with np.errstate(over="ignore"):
            yield np.dtype(dtype).name, DEEPSEEK, wide.astype(dtype)
            yield f"special_{np.dtype(dtype).name}", dims, special.astype(dtype)


def per_tensor_rows(fmt: CacheFormat, k_scale: float) -> Iterator[tuple[str, Widths, Any]]:
    """Named rows for a format of one code a value."""
    kind = E5M2 if fmt.name == "fp8_e5m2" else E4M3
    yield "all_bfloat16", DEEPSEEK, all_bfloat16(DEEPSEEK)
    between = np.concatenate([ties(kind) * np.float32(k_scale), signed_edges(k_scale)])
    yield "ties", DEEPSEEK, np.resize(between, (2, 576)).astype(np.float32)
    if k_scale == 0.3:
        dims = Widths(40, 8)
        edges = filled(signed_edges(k_scale), dims, np.dtype(np.float32))
        yield from other_inputs((dims, edges))
    if k_scale in (1.0, 0.3):
        for dims in (Widths(40, 8), Widths(34, 0)):
            yield "edges", dims, filled(signed_edges(k_scale), dims)


def tile_rows(dims: RowWidths) -> Any:
    """bf16 rows whose tiles are zero, hold an infinity or a NaN, or have telling largest values."""
    rows = scattered(1, dims).astype(np.float32)
    shape, key = rows[0, :TILE] / 4, rows[0, dims.L :]
    with np.errstate(over="ignore"):
        tiles = [shape * 0, -shape * 0, *(np.full(TILE, x) for x in (np.nan, np.inf, -np.inf))]
        tiles += [with_first(shape, x) for x in (np.nan, np.inf, -np.inf, -np.nan)]
        tiles += [with_first(shape, np.inf, np.nan, -np.inf), with_first(shape * 0, np.inf, np.nan)]
        largest = (336.0, -336.0, 448.0, 450.0, 446.0, 1.0, -7.0, 3.0)
        tiles += [with_first(shape, x) for x in largest]
        powers = (-133, -126, -120, -40, -23, -22, -14, -13, -5, 1, 6, 30, 100, 119)
        for power in powers:
            unit = np.float32(2.0**power)
            tiles += [with_first(shape, x) * unit for x in (448.0, -450.0)]
        tiles += [shape * np.float32(2.0**127), shape * np.float32(2.0**-126)]
    tiles = np.resize(np.stack(tiles), (-(-len(tiles) * TILE // dims.L) * dims.L // TILE, TILE))
    keys = np.resize(np.concatenate([key, signed_edges()]), (len(tiles) * TILE // dims.L, dims.R))
    return np.concatenate([tiles.reshape(-1, dims.L), keys], axis=1).astype(BFLOAT16)


def with_first(values: Any, *first: float) -> Any:
    changed = values.copy()
    changed[: len(first)] = first[: len(values)]
    return changed


def tied_tiles() -> Any:
    """float32 tiles with all ties of E4M3 under a largest value that makes the scale a known one.

    By `"pow2"` and `"raw"` alike the scales are powers of two.
    """
    found = ties(E4M3)
    parts = np.resize(found, (-(-len(found) // 124) * 124,)).reshape(-1, 124)
    anchor = np.broadcast_to(np.float32([448, -448, 0, -0.0]), (len(parts), 4))
    tiles = np.concatenate([anchor, parts], axis=1)
    tiles = np.resize(tiles, (-(-len(tiles) // 4) * 4, TILE)).reshape(-1, 512)
    keys = np.resize(halves_between_bfloat16(), (len(tiles), 64))
    return np.concatenate([tiles * np.float32(2.0**-7), keys], axis=1).astype(np.float32)


def halves_between_bfloat16() -> Any:
    """float32 half-way between bf16 numbers, and the floats beside each."""
    bits = np.arange(0x3F80_8000, 0x3FA0_8000, 0x0001_0000, dtype=np.uint32)
    around = np.stack([bits - 1, bits, bits + 1], axis=1).astype(np.uint32)
    return around.ravel().view(np.float32)


def ds_mla_rows() -> Iterator[tuple[str, Widths, Any]]:
    """Named rows for tiles of codes with keys in bf16."""
    yield "all_bfloat16", DEEPSEEK, all_bfloat16(DEEPSEEK)
    yield "tiles", DEEPSEEK, tile_rows(DEEPSEEK)
    yield "ties", DEEPSEEK, tied_tiles()
    yield "scattered", DEEPSEEK, scattered(9, DEEPSEEK)
    dims = Widths(256, 8)
    yield from other_inputs((dims, tile_rows(dims).astype(np.float32)))
    for dims in (Widths(128, 8), Widths(256, 0)):
        yield "tiles", dims, tile_rows(dims)


def half_rows(dims: RowWidths, largest: int) -> Any:
    """bf16 rows whose latent or key is zero, holds an infinity or a NaN, or has telling values."""
    rows = scattered(1, dims).astype(np.float32)[0]
    latent, key = rows[: dims.L] / 4, rows[dims.L :] / 4
    specials = [(np.nan,), (np.inf,), (-np.inf,), (-np.nan, np.inf), (0.0, np.nan), (-largest,)]
    with np.errstate(over="ignore"):
        pairs = [(latent * 0, key), (latent, key * 0), (-latent * 0, -key * 0)]
        pairs += [(with_first(latent, *x), key) for x in specials]
        pairs += [(latent, with_first(key, *x)) for x in specials] if dims.R else []
        for unit in (1.0, 2.0**-20, 2.0**-126, 2.0**-133, 2.0**100, 2.0**120):
            pairs.append([half_steps(n, largest) * np.float32(unit) for n in (dims.L, dims.R)])
        pairs += [(latent * np.float32(2.0**127), key * np.float32(2.0**-126))]
        pairs += [(with_first(latent * 0, -1.0), with_first(key * 0, -(2.0**-40)))]
    return np.stack([np.concatenate(pair) for pair in pairs]).astype(BFLOAT16)


def half_steps(count: int, largest: int) -> Any:
    """float32 half-way between integers, under a largest value that makes the scale 1."""
    steps = np.resize(np.arange(-largest, largest), count) + np.float32(0.5)
    return with_first(steps.astype(np.float32), largest, -largest)[:count]


def tied_halves(dims: RowWidths, largest: int) -> Any:
    """float32 rows of `(code + 1/2) * scale` for scales that are no powers of two, and beside."""
    rows = []
    for amax in np.float32([1.0, 3.3, 0.7, 448.0]):
        scale = amax / np.float32(largest)
        half = (np.arange(-largest, largest) + np.float32(0.5)).astype(np.float32) * scale
        around = [half, *(np.nextafter(half, np.float32(x)) for x in (-np.inf, np.inf))]
        values = np.resize(np.stack(around, axis=1), dims.L - 1)
        rows.append(np.concatenate([[amax], values, [amax], np.resize(values, dims.R - 1)]))
    return np.asarray(rows, np.float32)


def per_token_rows(fmt: CacheFormat) -> Iterator[tuple[str, Widths, Any]]:
    """Named rows for integers with a scale for the latent and one for the key."""
    largest = 127 if fmt.name == "int8_per_token" else 7
    yield "all_bfloat16", DEEPSEEK, all_bfloat16(DEEPSEEK)
    yield "halves", DEEPSEEK, half_rows(DEEPSEEK, largest)
    yield "ties", DEEPSEEK, tied_halves(DEEPSEEK, largest)
    yield "scattered", DEEPSEEK, scattered(9, DEEPSEEK)
    dims = Widths(40, 8)
    yield from other_inputs((dims, half_rows(dims, largest).astype(np.float32)))
    for dims in (Widths(40, 8), Widths(48, 0)):
        yield "halves", dims, half_rows(dims, largest)


def plain_rows(fmt: CacheFormat) -> Iterator[tuple[str, Widths, Any]]:
    """Named rows for elements that are copied: NaNs with bits of their own among them."""
    word = np.dtype(f"u{fmt.storage.itemsize}")
    signalling = np.array(np.inf, fmt.storage).view(word) + word.type(1)
    for dims in (DEEPSEEK, Widths(43, 6)):
        rows = filled(signed_edges(), dims, fmt.storage)
        rows.view(word)[0, -2:] = signalling, ~word.type(0)
        yield "edges", dims, rows


def stored_rows(fmt: CacheFormat, dims: RowWidths) -> Any:
    """Rows of a packed format for readers: every code in the latent and in the key, scales that
    no writer of ours leaves, keys of all kinds."""
    layout = fmt.layout(dims)
    narrowest = min(f.count for f in layout if f.dtype.itemsize == 1 and f.count)
    rows = np.arange(max(-(-256 // narrowest), len(TILE_SCALES)))[:, None]
    parts = []
    for number, field in enumerate(layout):
        columns = np.arange(field.count)
        if field.dtype.itemsize == 1:
            elements = (columns + rows * min(field.count, 37)).astype(np.uint8)
        elif field.dtype == BFLOAT16:
            elements = ((columns + rows * field.count) * 1031 + 17).astype(np.uint16)
        else:
            places = (columns + rows * 5 + number) % len(TILE_SCALES)
            elements = np.asarray(TILE_SCALES, np.float32)[places]
        parts.append(elements.view(np.uint8))
    return np.concatenate(parts, axis=1)
