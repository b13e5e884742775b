"""Device functions for Numba kernels: cache rows in words, by a group of threads a row.

Arrays come as words of `elements` values, a packed cache as words of as many codes. Where a format
has scales of its own, a kernel lets all its threads meet twice:

    if scales:
        peaks = cuda.shared.array((groups of a block, scales, lanes), np.uint32)[group]
        measure(peaks, place, lane, token, rows, table)
        cuda.syncthreads()
        settle(peaks, lane)
        cuda.syncthreads()
        write(cache, place, lane, token, rows, table, peaks)
    else:
        write(cache, place, lane, token, rows, table)

`place`, `rows` and `table` are as `numba_cache_rows.item_writer` has them. (Barriers and shared
memory stand in kernels, since older simulators lose them in device functions of other modules.)
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from sandbox.cache_formats import CacheFormat, RowWidths
from sandbox.cache_formats.ds_mla import TILE
from sandbox.kernels.numba_cache_rows import (
    bf16_pair,
    code_bits,
    coder,
    peak,
    pieces_writer,
    scale_count,
    scaler,
)
from sandbox.kernels.numba_columns import scalar, word_copier, word_pair, word_turner
from sandbox.kernels.numba_target import cuda


@dataclass(frozen=True)
class RowWords:
    """A row's format and how it is cut: `elements` values a word, `lanes` threads a row."""

    fmt: CacheFormat
    widths: RowWidths
    dtype: np.dtype
    elements: int
    tile_scale: str | None
    lanes: int

    @property
    def scales(self) -> int:
        return scale_count(self.fmt, self.widths)

    @property
    def scaled_key(self) -> bool:
        return bool(self.scales) and not self.fmt.tile_scales

    @property
    def unit(self) -> int:
        """Bytes of a word of the cache."""
        if not self.fmt.packed:
            return self.elements * self.dtype.itemsize
        return self.elements * code_bits(self.fmt) // 8

    def places(self) -> dict[str, int]:
        """Words of the cache before each field of a row."""
        fields = self.fmt.fields(self.widths).values()
        return {field.name: field.offset // self.unit for field in fields}


@functools.cache
def row_writer(row: RowWords) -> tuple[Any, Any, Any]:
    """Device functions `measure`, `settle`, `write`."""
    write = _scaled(row) if row.scales else _unscaled(row)
    return _measure(row), _settle(row.scales, row.lanes), write


def _words_a_scale(row: RowWords) -> int:
    return (TILE if row.fmt.tile_scales else row.widths.L) // row.elements


def _measure(row: RowWords) -> Any:
    """Each thread's peak for each scale."""
    lanes, scales, scaled_key = row.lanes, row.scales, row.scaled_key
    latent_peak, key_peak = (_word_peak(row, turned) for turned in (False, True))
    words_a_scale = _words_a_scale(row)

    @cuda.jit(device=True)
    def measure(peaks, place, lane, token, rows, table):
        kv_c, k_pe, _ = rows
        for number in range(scales):
            peaks[number, lane] = 0
        if place[0] < 0:
            return
        for i in range(lane, kv_c.shape[1], lanes):
            number = i // words_a_scale
            most = peaks[number, lane]
            peaks[number, lane] = latent_peak(kv_c[token, i], most)
        if scaled_key:
            most = np.uint32(0)
            for i in range(lane, k_pe.shape[1], lanes):
                most = key_peak(k_pe[token, i], most, i, token, table)
            peaks[1, lane] = most

    return measure


def _word_peak(row: RowWords, turned: bool) -> Any:
    largest, pairs = peak(row.fmt), row.elements // 2
    pair_of = word_pair(row.dtype, row.elements, turned)

    @cuda.jit(device=True)
    def word_peak(word, most, *where):
        for i in range(pairs):
            x, y = pair_of(word, i, *where)
            most = largest(x, y, most)
        return most

    return word_peak


def _settle(scales: int, lanes: int) -> Any:
    """The largest of a group's peaks, for each scale, to lane 0's place."""

    @cuda.jit(device=True)
    def settle(peaks, lane):
        for number in range(lane, scales, lanes):
            most = peaks[number, 0]
            for other in range(1, lanes):
                most = max(most, peaks[number, other])
            peaks[number, 0] = most

    return settle


def _unscaled(row: RowWords) -> Any:
    lanes, number, code = row.lanes, scalar(), coder(row.fmt)
    copy = word_copier(row.dtype, row.elements, code)
    turn = word_turner(row.dtype, row.elements, code)

    @cuda.jit(device=True)
    def write(cache, place, lane, token, rows, table):
        block, offset = place
        if block < 0:
            return
        kv_c, k_pe, k_scale = rows
        scale, latents = number(k_scale), kv_c.shape[1]
        for i in range(lane, latents, lanes):
            cache[block, offset, i] = copy(kv_c[token, i], scale)
        for i in range(lane, k_pe.shape[1], lanes):
            cache[block, offset, latents + i] = turn(k_pe[token, i], scale, i, token, table)

    return write


def _scaled(row: RowWords) -> Any:
    lanes, scales, words_a_scale = row.lanes, row.scales, _words_a_scale(row)
    copy = word_copier(row.dtype, row.elements, coder(row.fmt), code_bits(row.fmt))
    first_scale = row.places()["kv_c_scales" if row.fmt.tile_scales else "kv_c_scale"]
    scale_of, put, pieces = scaler(row.fmt, row.tile_scale), pieces_writer(row.unit), 4 // row.unit
    write_key = _scaled_key(row) if row.scaled_key else _bf16_key(row)

    @cuda.jit(device=True)
    def write(cache, place, lane, token, rows, table, peaks):
        block, offset = place
        if block < 0:
            return
        kv_c, k_pe, _ = rows
        for number in range(lane, scales, lanes):
            bits = scale_of(peaks[number, 0]).view(np.uint32)
            put(cache, place, first_scale + pieces * number, bits)
        for i in range(lane, kv_c.shape[1], lanes):
            scale = scale_of(peaks[i // words_a_scale, 0])
            cache[block, offset, i] = copy(kv_c[token, i], scale)
        for i in range(lane, k_pe.shape[1], lanes):
            write_key(cache, place, k_pe[token, i], peaks, i, token, table)

    return write


def _scaled_key(row: RowWords) -> Any:
    turn = word_turner(row.dtype, row.elements, coder(row.fmt), code_bits(row.fmt))
    first, scale_of = row.places()["k_pe"], scaler(row.fmt, None)

    @cuda.jit(device=True)
    def write_key(cache, place, word, peaks, i, token, table):
        block, offset = place
        scale = scale_of(peaks[1, 0])
        cache[block, offset, first + i] = turn(word, scale, i, token, table)

    return write_key


def _bf16_key(row: RowWords) -> Any:
    pair_of, join = word_pair(row.dtype, row.elements, True), bf16_pair()
    put, first, pairs = pieces_writer(row.unit), row.places()["k_pe"], row.elements // 2
    pieces = 4 // row.unit

    @cuda.jit(device=True)
    def write_key(cache, place, word, peaks, i, token, table):
        for number in range(pairs):
            x, y = pair_of(word, number, i, token, table)
            put(cache, place, first + pieces * (i * pairs + number), join(x, y))

    return write_key
