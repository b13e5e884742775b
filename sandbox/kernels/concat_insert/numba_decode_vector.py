"""Decode in Numba, in words of up to 8 bytes."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from sandbox.kernels import numba_target
from sandbox.kernels.concat_insert import concat_insert_decode
from sandbox.kernels.concat_insert.launch import decode_vector
from sandbox.kernels.concat_insert.numba_prefill_scalar import table_or_empty
from sandbox.kernels.concat_insert.numba_prefill_vector import torn_pairs, word_turner, words
from sandbox.kernels.numba_target import cuda

LANES, ROWS = 32, 4


@functools.cache
def _kernel(dtype: np.dtype, word: np.dtype) -> Any:
    turn_word = word_turner(dtype, word)

    @cuda.jit
    def decode_vector(ql_nope, q_pe, kv_c, k_pe, cache, slot_mapping, positions, cos_sin, q_out):
        token, head = cuda.blockIdx.x, cuda.blockIdx.y * ROWS + cuda.threadIdx.y
        latent, rope = kv_c.shape[1], k_pe.shape[1]
        if head < q_out.shape[1]:
            for place in range(cuda.threadIdx.x, latent, LANES):
                q_out[token, head, place] = ql_nope[token, head, place]
            for place in range(cuda.threadIdx.x, rope, LANES):
                query = turn_word(q_pe[token, head, place], place, token, positions, cos_sin)
                q_out[token, head, latent + place] = query
        elif head == q_out.shape[1]:
            slot, block_size = slot_mapping[token], cache.shape[1]
            if slot >= 0 and slot < cache.shape[0] * block_size:
                block, offset = slot // block_size, slot % block_size
                for place in range(cuda.threadIdx.x, latent, LANES):
                    cache[block, offset, place] = kv_c[token, place]
                for place in range(cuda.threadIdx.x, rope, LANES):
                    key = turn_word(k_pe[token, place], place, token, positions, cos_sin)
                    cache[block, offset, latent + place] = key

    return decode_vector


def _supports(**arguments: Any) -> str | None:
    vector = decode_vector(arguments)
    return torn_pairs(vector, arguments["positions"], arguments["cache"].dtype)


@concat_insert_decode.variant("numba_vector", kind="numba", preference=8, supports=_supports)
def numba_vector(slot_mapping: Any, positions: Any, cos_sin: Any, **rows: Any) -> None:
    """A warp a head or a cache row in 8-byte words, pairs rotated inside the word."""
    word = words(decode_vector(rows))
    heads = rows["q_out"].shape[1]
    numba_target.launch(
        _kernel(rows["cache"].dtype, word),
        (slot_mapping.shape[0], -(-(heads + 1) // ROWS)),
        (LANES, ROWS),
        *(rows[name].view(word) for name in ("ql_nope", "q_pe", "kv_c", "k_pe", "cache")),
        slot_mapping,
        *table_or_empty(slot_mapping, positions, cos_sin),
        rows["q_out"].view(word),
    )
