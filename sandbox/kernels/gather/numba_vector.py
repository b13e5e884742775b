"""Gather in Numba, a warp a row in words of up to 8 bytes."""

from __future__ import annotations

import functools
from typing import Any

from sandbox.kernels import numba_target
from sandbox.kernels.gather import gather
from sandbox.kernels.gather.launch import widest_vector
from sandbox.kernels.gather.numba_scalar import NOT_FOUND, moved, row_finder, starts_or_none
from sandbox.kernels.gather.restore import restores, values_at_once
from sandbox.kernels.numba_target import cuda

LANES, ROWS = 32, 4


def elements_a_word(rows: Any, out: Any, **how: Any) -> int:
    """Elements that all rows allow in a word of 8 bytes at most."""
    if restores(rows, out):
        format_of_rows = how["cache_format"], how["kv_lora_rank"]
        return max(1, values_at_once(rows, out, *format_of_rows, widest=8))
    return min(8, widest_vector(rows, out)) // out.dtype.itemsize


@functools.cache
def _kernel(move: Any) -> Any:
    find = row_finder()

    @cuda.jit
    def gather_vector(codes, keys, scales, block_table, cu_seq_lens, seq_starts, num_tokens, out):
        row = cuda.blockIdx.x * ROWS + cuda.threadIdx.y
        if row < num_tokens:
            block_size = codes.shape[1]
            place = find(row, block_size, codes.shape[0], block_table, cu_seq_lens, seq_starts)
            if place >= 0:
                block, offset = place // block_size, place % block_size
                for word in range(cuda.threadIdx.x, out.shape[1], LANES):
                    move(codes, keys, scales, block, offset, word, out, row)
            elif place == NOT_FOUND:
                for word in range(cuda.threadIdx.x, out.shape[1], LANES):
                    out[row, word] = 0

    return gather_vector


@gather.variant("numba_vector", kind="numba", preference=8)
def numba_vector(
    cache: Any,
    block_table: Any,
    cu_seq_lens: Any,
    seq_starts: Any,
    num_tokens: int,
    out: Any,
    **how: Any,
) -> None:
    """A warp a row, in 8-byte words where rows allow."""
    move, rows, words = moved(cache, out, elements_a_word(cache, out, **how), **how)
    tables = (block_table, cu_seq_lens, starts_or_none(cu_seq_lens, seq_starts), num_tokens)
    blocks = -(-num_tokens // ROWS)
    numba_target.launch(_kernel(move), blocks, (LANES, ROWS), *rows, *tables, words)
