"""Plain insert in Numba, one thread an element."""

from __future__ import annotations

import functools
from typing import Any

from sandbox.kernels import numba_target
from sandbox.kernels.concat_insert import concat_insert
from sandbox.kernels.numba_target import cuda

THREADS = 128


@functools.cache
def _kernel() -> Any:
    @cuda.jit
    def insert_scalar(kv_c, k_pe, cache, slot_mapping):
        element = cuda.grid(1)
        token = element // cache.shape[2]
        if token < slot_mapping.shape[0]:
            slot, block_size = slot_mapping[token], cache.shape[1]
            if slot >= 0 and slot < cache.shape[0] * block_size:
                column, latent = element % cache.shape[2], kv_c.shape[1]
                block, offset = slot // block_size, slot % block_size
                if column < latent:
                    cache[block, offset, column] = kv_c[token, column]
                else:
                    cache[block, offset, column] = k_pe[token, column - latent]

    return insert_scalar


@concat_insert.variant("numba_scalar", kind="numba", preference=5)
def numba_scalar(kv_c: Any, k_pe: Any, cache: Any, slot_mapping: Any) -> None:
    """One thread an element."""
    blocks = -(-slot_mapping.shape[0] * cache.shape[2] // THREADS)
    numba_target.launch(_kernel(), blocks, THREADS, kv_c, k_pe, cache, slot_mapping)
