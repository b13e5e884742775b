"""Plain insert in Numba, a warp a row in words of up to 8 bytes."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from sandbox.kernels import numba_target
from sandbox.kernels.concat_insert import concat_insert
from sandbox.kernels.concat_insert.numba_rows import (
    elements_a_word,
    lanes_for,
    row_arrays_in_words,
    row_words,
    torn_pairs,
)
from sandbox.kernels.numba_cache_rows import row_finder
from sandbox.kernels.numba_cache_words import RowWords, row_writer
from sandbox.kernels.numba_target import cuda

ROWS = 4


@functools.cache
def _kernel(row: RowWords) -> Any:
    find, (measure, settle, write) = row_finder(), row_writer(row)
    scales, shared = row.scales, (ROWS, row.scales, row.lanes)

    @cuda.jit
    def insert_vector(kv_c, k_pe, cache, k_scale, slot_mapping, positions, cos_sin):
        lane, group = cuda.threadIdx.x, cuda.threadIdx.y
        token = cuda.blockIdx.x * ROWS + group
        place, rows, table = (
            find(token, slot_mapping, cache),
            (kv_c, k_pe, k_scale),
            (positions, cos_sin),
        )
        if scales:
            peaks = cuda.shared.array(shared, np.uint32)[group]
            measure(peaks, place, lane, token, rows, table)
            cuda.syncthreads()
            settle(peaks, lane)
            cuda.syncthreads()
            write(cache, place, lane, token, rows, table, peaks)
        else:
            write(cache, place, lane, token, rows, table)

    return insert_vector


def _elements(arguments: dict[str, Any]) -> int:
    return elements_a_word(arguments, [], [])


def _supports(**arguments: Any) -> str | None:
    return torn_pairs(arguments, _elements(arguments))


@concat_insert.variant("numba_vector", kind="numba", preference=8, supports=_supports)
def numba_vector(**arguments: Any) -> None:
    """A warp a row, in 8-byte words where rows allow."""
    if not arguments["slot_mapping"].shape[0]:  # empty arrays need not divide into words
        return
    elements = _elements(arguments)
    lanes = lanes_for(arguments["kv_c"].shape[1], elements)
    row = row_words(elements, lanes, **arguments)
    numba_target.launch(
        _kernel(row),
        -(-arguments["slot_mapping"].shape[0] // ROWS),
        (lanes, ROWS),
        *row_arrays_in_words(row, **arguments),
    )
