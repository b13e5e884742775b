"""Plain insert in Numba, a warp a row in words of up to 8 bytes."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from sandbox.kernels import numba_target
from sandbox.kernels.concat_insert import concat_insert
from sandbox.kernels.concat_insert.launch import widest_vector
from sandbox.kernels.numba_target import cuda

LANES, ROWS = 32, 4


@functools.cache
def _kernel() -> Any:
    @cuda.jit
    def insert_vector(kv_c, k_pe, cache, slot_mapping):
        token = cuda.blockIdx.x * ROWS + cuda.threadIdx.y
        if token < slot_mapping.shape[0]:
            slot, block_size = slot_mapping[token], cache.shape[1]
            if slot >= 0 and slot < cache.shape[0] * block_size:
                latent = kv_c.shape[1]
                block, offset = slot // block_size, slot % block_size
                for word in range(cuda.threadIdx.x, latent, LANES):
                    cache[block, offset, word] = kv_c[token, word]
                for word in range(cuda.threadIdx.x, k_pe.shape[1], LANES):
                    cache[block, offset, latent + word] = k_pe[token, word]

    return insert_vector


@concat_insert.variant("numba_vector", kind="numba", preference=8)
def numba_vector(kv_c: Any, k_pe: Any, cache: Any, slot_mapping: Any) -> None:
    """A warp a row, in 8-byte words where rows allow."""
    word = np.dtype(f"u{min(8, widest_vector(kv_c, k_pe, cache))}")
    numba_target.launch(
        _kernel(),
        -(-slot_mapping.shape[0] // ROWS),
        (LANES, ROWS),
        kv_c.view(word),
        k_pe.view(word),
        cache.view(word),
        slot_mapping,
    )
