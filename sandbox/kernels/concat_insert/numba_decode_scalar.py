"""Decode in Numba, an element or a pair at a time."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from sandbox.kernels import numba_target
from sandbox.kernels.concat_insert import concat_insert_decode
from sandbox.kernels.concat_insert.numba_prefill_scalar import table_or_empty, turner
from sandbox.kernels.numba_math import from_float32, to_float32
from sandbox.kernels.numba_target import cuda

THREADS = 64


@functools.cache
def _kernel(dtype: np.dtype) -> Any:
    turn = turner(to_float32(dtype), from_float32(dtype))

    @cuda.jit
    def decode_scalar(ql_nope, q_pe, kv_c, k_pe, cache, slot_mapping, positions, cos_sin, q_out):
        token, head = cuda.blockIdx.x, cuda.blockIdx.y
        latent, pairs = kv_c.shape[1], k_pe.shape[1] // 2
        if head < q_out.shape[1]:
            for column in range(cuda.threadIdx.x, latent, THREADS):
                q_out[token, head, column] = ql_nope[token, head, column]
            for pair in range(cuda.threadIdx.x, pairs, THREADS):
                even, odd = 2 * pair, 2 * pair + 1
                x, y = q_pe[token, head, even], q_pe[token, head, odd]
                x, y = turn(x, y, pair, token, positions, cos_sin)
                q_out[token, head, latent + even] = x
                q_out[token, head, latent + odd] = y
        else:
            slot, block_size = slot_mapping[token], cache.shape[1]
            if slot >= 0 and slot < cache.shape[0] * block_size:
                block, offset = slot // block_size, slot % block_size
                for column in range(cuda.threadIdx.x, latent, THREADS):
                    cache[block, offset, column] = kv_c[token, column]
                for pair in range(cuda.threadIdx.x, pairs, THREADS):
                    even, odd = 2 * pair, 2 * pair + 1
                    x, y = k_pe[token, even], k_pe[token, odd]
                    x, y = turn(x, y, pair, token, positions, cos_sin)
                    cache[block, offset, latent + even] = x
                    cache[block, offset, latent + odd] = y

    return decode_scalar


@concat_insert_decode.variant("numba_scalar", kind="numba", preference=5)
def numba_scalar(
    ql_nope: Any,
    q_pe: Any,
    kv_c: Any,
    k_pe: Any,
    cache: Any,
    slot_mapping: Any,
    positions: Any,
    cos_sin: Any,
    q_out: Any,
) -> None:
    """A block a head or a cache row, an element or a pair at a time."""
    numba_target.launch(
        _kernel(cache.dtype),
        (slot_mapping.shape[0], q_out.shape[1] + 1),
        THREADS,
        ql_nope,
        q_pe,
        kv_c,
        k_pe,
        cache,
        slot_mapping,
        *table_or_empty(slot_mapping, positions, cos_sin),
        q_out,
    )
