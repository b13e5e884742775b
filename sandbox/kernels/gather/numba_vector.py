"""Gather in Numba, a warp a row in words of up to 8 bytes."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from sandbox.kernels import numba_target
from sandbox.kernels.gather import gather
from sandbox.kernels.gather.launch import widest_vector
from sandbox.kernels.gather.numba_scalar import NOT_FOUND, row_finder, starts_or_none
from sandbox.kernels.numba_target import cuda

LANES, ROWS = 32, 4


@functools.cache
def _kernel() -> Any:
    find = row_finder()

    @cuda.jit
    def gather_vector(cache, block_table, cu_seq_lens, seq_starts, num_tokens, out):
        row = cuda.blockIdx.x * ROWS + cuda.threadIdx.y
        if row < num_tokens:
            block_size = cache.shape[1]
            place = find(row, block_size, cache.shape[0], block_table, cu_seq_lens, seq_starts)
            if place >= 0:
                block, offset = place // block_size, place % block_size
                for word in range(cuda.threadIdx.x, out.shape[1], LANES):
                    out[row, word] = cache[block, offset, word]
            elif place == NOT_FOUND:
                for word in range(cuda.threadIdx.x, out.shape[1], LANES):
                    out[row, word] = 0

    return gather_vector


@gather.variant("numba_vector", kind="numba", preference=8)
def numba_vector(
    cache: Any, block_table: Any, cu_seq_lens: Any, seq_starts: Any, num_tokens: int, out: Any
) -> None:
    """A warp a row, in 8-byte words where rows allow."""
    word = np.dtype(f"u{min(8, widest_vector(cache, out))}")
    numba_target.launch(
        _kernel(),
        -(-num_tokens // ROWS),
        (LANES, ROWS),
        cache.view(word),
        block_table,
        cu_seq_lens,
        starts_or_none(cu_seq_lens, seq_starts),
        num_tokens,
        out.view(word),
    )
