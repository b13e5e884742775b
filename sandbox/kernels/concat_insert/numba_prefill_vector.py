"""Prefill in Numba, in words of up to 8 bytes."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from sandbox.kernels import numba_target
from sandbox.kernels.concat_insert import concat_insert_prefill
from sandbox.kernels.concat_insert.launch import in_place, prefill_vector
from sandbox.kernels.concat_insert.numba_prefill_scalar import table_or_empty, turner
from sandbox.kernels.numba_math import decode, encode
from sandbox.kernels.numba_target import cuda

LANES, WARPS = 32, 4


@functools.cache
def word_turner(dtype: np.dtype, word: np.dtype) -> Any:
    """Device function: the pairs of dtype in word number `place` of the rotated columns turned."""
    turn = turner(decode(dtype), encode(dtype))
    bits = 8 * dtype.itemsize
    pairs = word.itemsize // (2 * dtype.itemsize)
    mask = np.uint64((1 << bits) - 1)

    @cuda.jit(device=True)
    def turn_word(value, place, token, positions, cos_sin):
        if cos_sin.shape[0] == 0:
            return value
        codes, turned = np.uint64(value), np.uint64(0)
        for i in range(pairs):
            low, high = np.uint64(2 * i * bits), np.uint64((2 * i + 1) * bits)
            even, odd = (codes >> low) & mask, (codes >> high) & mask
            even, odd = turn(even, odd, place * pairs + i, token, positions, cos_sin)
            turned |= (np.uint64(even) << low) | (np.uint64(odd) << high)
        return turned

    return turn_word


def words(vector: int) -> np.dtype:
    return np.dtype(f"u{min(8, vector)}")


def torn_pairs(vector: int, positions: Any, dtype: np.dtype) -> str | None:
    """Why words as wide as alignment allows cannot be rotated, or None."""
    if positions is not None and words(vector).itemsize < 2 * dtype.itemsize:
        return f"rotates pairs in one word, but rows are aligned to {vector} bytes only"
    return None


@functools.cache
def _kernel(dtype: np.dtype, word: np.dtype) -> Any:
    turn_word = word_turner(dtype, word)

    @cuda.jit
    def prefill_vector(
        q, k_nope, k_pe, kv_c, cache, slot_mapping, positions, cos_sin, q_out, k_out, aside
    ):
        token, lane, warp = cuda.blockIdx.x, cuda.threadIdx.x, cuda.threadIdx.y
        heads, nope, latent, rope = k_nope.shape[1], k_nope.shape[2], kv_c.shape[1], k_pe.shape[1]
        for head in range(warp, heads, WARPS):
            for place in range(lane, nope, LANES):
                k_out[token, head, place] = k_nope[token, head, place]
                if aside:
                    q_out[token, head, place] = q[token, head, place]
        slot, block_size = slot_mapping[token], cache.shape[1]
        inserts = warp == 0 and slot >= 0 and slot < cache.shape[0] * block_size
        if inserts:
            for place in range(lane, latent, LANES):
                cache[slot // block_size, slot % block_size, place] = kv_c[token, place]
        for place in range(lane, rope, LANES):
            key = turn_word(k_pe[token, place], place, token, positions, cos_sin)
            for head in range(warp, heads, WARPS):
                k_out[token, head, nope + place] = key
                query = q[token, head, nope + place]
                query = turn_word(query, place, token, positions, cos_sin)
                q_out[token, head, nope + place] = query
            if inserts:
                cache[slot // block_size, slot % block_size, latent + place] = key

    return prefill_vector


def _supports(**arguments: Any) -> str | None:
    vector = prefill_vector(arguments)
    return torn_pairs(vector, arguments["positions"], arguments["cache"].dtype)


@concat_insert_prefill.variant("numba_vector", kind="numba", preference=8, supports=_supports)
def numba_vector(slot_mapping: Any, positions: Any, cos_sin: Any, **rows: Any) -> None:
    """A block a token, a warp a head in 8-byte words, the key rotated once a warp."""
    word = words(prefill_vector(rows))
    numba_target.launch(
        _kernel(rows["cache"].dtype, word),
        slot_mapping.shape[0],
        (LANES, WARPS),
        *(rows[name].view(word) for name in ("q", "k_nope", "k_pe", "kv_c", "cache")),
        slot_mapping,
        *table_or_empty(slot_mapping, positions, cos_sin),
        *(rows[name].view(word) for name in ("q_out", "k_out")),
        not in_place(rows["q"], rows["q_out"]),
    )
