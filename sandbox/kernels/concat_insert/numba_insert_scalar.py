"""Plain insert in Numba, one thread an item of a row."""

from __future__ import annotations

import functools
from typing import Any

from sandbox.kernels import numba_target
from sandbox.kernels.concat_insert import concat_insert
from sandbox.kernels.concat_insert.numba_rows import row_arrays, row_key
from sandbox.kernels.numba_cache_rows import item_count, item_writer, row_finder
from sandbox.kernels.numba_target import cuda

THREADS = 128


@functools.cache
def _kernel(*key: Any) -> Any:
    find, write, items = row_finder(), item_writer(*key), item_count(*key[:2])

    @cuda.jit
    def insert_scalar(kv_c, k_pe, cache, k_scale, slot_mapping, positions, cos_sin):
        index = cuda.grid(1)
        token, item = index // items, index % items
        place = find(token, slot_mapping, cache)
        if place[0] >= 0:
            rows, table = (kv_c, k_pe, k_scale), (positions, cos_sin)
            write(cache, place, item, token, rows, table)

    return insert_scalar


@concat_insert.variant("numba_scalar", kind="numba", preference=5)
def numba_scalar(slot_mapping: Any, **arguments: Any) -> None:
    """One thread an element, or all values of one scale."""
    key = row_key(**arguments)
    blocks = -(-slot_mapping.shape[0] * item_count(*key[:2]) // THREADS)
    numba_target.launch(
        _kernel(*key), blocks, THREADS, *row_arrays(slot_mapping=slot_mapping, **arguments)
    )
