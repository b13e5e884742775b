"""Plain insert in Numba, a warp a row in words of up to 8 bytes."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from sandbox.kernels import numba_target
from sandbox.kernels.concat_insert import concat_insert
from sandbox.kernels.concat_insert.numba_rows import (
    elements_a_word,
    row_arrays_in_words,
    row_words,
    torn_pairs,
)
from sandbox.kernels.numba_cache_rows import row_finder
from sandbox.kernels.numba_cache_words import RowWords, row_writer
from sandbox.kernels.numba_target import cuda

LANES, ROWS = 32, 4


@functools.cache
def _kernel(row: RowWords) -> Any:
    find, (measure, settle, write) = row_finder(), row_writer(row)
    scales, shared = row.scales, (ROWS, max(1, row.scales), LANES)

    @cuda.jit
    def insert_vector(kv_c, k_pe, cache, k_scale, slot_mapping, positions, cos_sin):
        peaks = cuda.shared.array(shared, np.uint32)
        lane, group = cuda.threadIdx.x, cuda.threadIdx.y
        token = cuda.blockIdx.x * ROWS + group
        place, rows, table = (
            find(token, slot_mapping, cache),
            (kv_c, k_pe, k_scale),
            (positions, cos_sin),
        )
        if scales:
            measure(peaks, place, lane, group, token, rows, table)
            cuda.syncthreads()
            settle(peaks, lane, group)
            cuda.syncthreads()
        write(peaks, cache, place, lane, group, token, rows, table)

    return insert_vector


def _elements(arguments: dict[str, Any]) -> int:
    return elements_a_word(arguments, [], [])


def _supports(**arguments: Any) -> str | None:
    return torn_pairs(arguments, _elements(arguments))


@concat_insert.variant("numba_vector", kind="numba", preference=8, supports=_supports)
def numba_vector(**arguments: Any) -> None:
    """A warp a row, in 8-byte words where rows allow."""
    row = row_words(_elements(arguments), LANES, **arguments)
    numba_target.launch(
        _kernel(row),
        -(-arguments["slot_mapping"].shape[0] // ROWS),
        (LANES, ROWS),
        *row_arrays_in_words(row, **arguments),
    )
