"""Gather in Numba, one thread an element."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from sandbox.cache_formats import FORMATS, Widths
from sandbox.kernels import numba_target
from sandbox.kernels.gather import gather
from sandbox.kernels.numba_cache_rows_read import copier, restorer, row_views
from sandbox.kernels.numba_target import cuda

THREADS = 128
NOT_OWNED, NOT_FOUND = -1, -2


@functools.cache
def row_finder() -> Any:
    """Device function: cache row (block * block_size + offset) of a workspace row, or negative."""

    @cuda.jit(device=True)
    def find(row, block_size, num_blocks, block_table, cu_seq_lens, seq_starts):
        requests = cu_seq_lens.shape[0] - 1
        low, high = 0, requests + 1
        while low < high:
            middle = (low + high) // 2
            if cu_seq_lens[middle] <= row:
                low = middle + 1
            else:
                high = middle
        request = low - 1
        if request < 0 or request >= requests:
            return NOT_OWNED
        position = row - cu_seq_lens[request]
        if seq_starts.shape[0] > 0:
            position += seq_starts[request]
        if position < 0:
            return NOT_FOUND
        column = position // block_size
        if column >= block_table.shape[1]:
            return NOT_FOUND
        block = block_table[request, column]
        if block < 0 or block >= num_blocks:
            return NOT_FOUND
        return block * block_size + position % block_size

    return find


def starts_or_none(cu_seq_lens: Any, seq_starts: Any) -> Any:
    """An empty array for None, which Numba's device functions cannot compare."""
    return cu_seq_lens[:0] if seq_starts is None else seq_starts


def moved(rows: Any, out: Any, count: int, **arguments: Any) -> tuple[Any, ...]:
    """How words of `count` elements go from rows `[blocks, block_size, row]` to `out`: a device
    function, the views of the rows that it takes, and `out` in words."""
    words = out.view(np.dtype(f"u{count * out.dtype.itemsize}"))
    if rows.dtype == out.dtype:
        views = (rows.view(words.dtype),) * 3
        return copier(), views, words
    fmt, L = FORMATS[arguments["cache_format"]], arguments["kv_lora_rank"]
    restore = restorer(fmt.name, Widths(L, out.shape[1] - L), out.dtype, count)
    return restore, row_views(rows, fmt, count, arguments["k_scale"]), words


@functools.cache
def _kernel(move: Any) -> Any:
    find = row_finder()

    @cuda.jit
    def gather_scalar(codes, keys, scales, block_table, cu_seq_lens, seq_starts, num_tokens, out):
        element = cuda.grid(1)
        row = element // out.shape[1]
        if row < num_tokens:
            block_size = codes.shape[1]
            place = find(row, block_size, codes.shape[0], block_table, cu_seq_lens, seq_starts)
            column = element % out.shape[1]
            if place >= 0:
                block, offset = place // block_size, place % block_size
                move(codes, keys, scales, block, offset, column, out, row)
            elif place == NOT_FOUND:
                out[row, column] = 0

    return gather_scalar


@gather.variant("numba_scalar", kind="numba", preference=5)
def numba_scalar(
    cache: Any,
    block_table: Any,
    cu_seq_lens: Any,
    seq_starts: Any,
    num_tokens: int,
    out: Any,
    **how: Any,
) -> None:
    """One thread an element."""
    move, rows, words = moved(cache, out, 1, **how)
    starts = starts_or_none(cu_seq_lens, seq_starts)
    blocks = -(-num_tokens * out.shape[1] // THREADS)
    tables = (block_table, cu_seq_lens, starts, num_tokens)
    numba_target.launch(_kernel(move), blocks, THREADS, *rows, *tables, words)
