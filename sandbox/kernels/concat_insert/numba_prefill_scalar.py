"""Prefill in Numba, an element or a pair at a time."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from sandbox import arrays
from sandbox.kernels import numba_target
from sandbox.kernels.concat_insert import concat_insert_prefill
from sandbox.kernels.concat_insert.launch import in_place
from sandbox.kernels.numba_math import from_float32, to_float32
from sandbox.kernels.numba_target import cuda

THREADS = 64


def table_or_empty(slot_mapping: Any, positions: Any, cos_sin: Any) -> tuple[Any, Any]:
    """Positions and table, both empty for None, which Numba's device functions cannot compare."""
    if positions is None:
        xp = arrays.namespace(slot_mapping)
        return slot_mapping[:0], xp.empty((0, 0), np.float32)
    return positions, cos_sin


@functools.cache
def turner(to: Any, back: Any) -> Any:
    """Device function: the pair `(even, odd)` turned; `to` and `back` convert to float32 and back.

    Without a table the pair as it is; NaN for a position outside the table.
    """

    @cuda.jit(device=True)
    def turn(even, odd, pair, token, positions, cos_sin):
        if cos_sin.shape[0] == 0:
            return even, odd
        cosine = sine = np.float32(np.nan)
        position = positions[token]
        if position >= 0 and position < cos_sin.shape[0]:
            cosine = cos_sin[position, pair]
            sine = cos_sin[position, cos_sin.shape[1] // 2 + pair]
        x, y = to(even), to(odd)
        return back(x * cosine - y * sine), back(x * sine + y * cosine)

    return turn


@functools.cache
def _kernel(dtype: np.dtype) -> Any:
    turn = turner(to_float32(dtype), from_float32(dtype))

    @cuda.jit
    def prefill_scalar(
        q, k_nope, k_pe, kv_c, cache, slot_mapping, positions, cos_sin, q_out, k_out, aside
    ):
        token = cuda.blockIdx.x
        heads, nope, latent = k_nope.shape[1], k_nope.shape[2], kv_c.shape[1]
        pairs = k_pe.shape[1] // 2
        for item in range(cuda.threadIdx.x, heads * nope, THREADS):
            head, column = item // nope, item % nope
            k_out[token, head, column] = k_nope[token, head, column]
            if aside:
                q_out[token, head, column] = q[token, head, column]
        for item in range(cuda.threadIdx.x, heads * pairs, THREADS):
            head, pair = item // pairs, item % pairs
            even, odd = 2 * pair, 2 * pair + 1
            x, y = turn(k_pe[token, even], k_pe[token, odd], pair, token, positions, cos_sin)
            k_out[token, head, nope + even] = x
            k_out[token, head, nope + odd] = y
            x, y = q[token, head, nope + even], q[token, head, nope + odd]
            x, y = turn(x, y, pair, token, positions, cos_sin)
            q_out[token, head, nope + even] = x
            q_out[token, head, nope + odd] = y
        slot, block_size = slot_mapping[token], cache.shape[1]
        if slot >= 0 and slot < cache.shape[0] * block_size:
            block, offset = slot // block_size, slot % block_size
            for column in range(cuda.threadIdx.x, latent, THREADS):
                cache[block, offset, column] = kv_c[token, column]
            for pair in range(cuda.threadIdx.x, pairs, THREADS):
                even, odd = 2 * pair, 2 * pair + 1
                x, y = turn(k_pe[token, even], k_pe[token, odd], pair, token, positions, cos_sin)
                cache[block, offset, latent + even] = x
                cache[block, offset, latent + odd] = y

    return prefill_scalar


@concat_insert_prefill.variant("numba_scalar", kind="numba", preference=5)
def numba_scalar(
    q: Any,
    k_nope: Any,
    k_pe: Any,
    kv_c: Any,
    cache: Any,
    slot_mapping: Any,
    positions: Any,
    cos_sin: Any,
    q_out: Any,
    k_out: Any,
) -> None:
    """A block a token, an element or a pair at a time."""
    numba_target.launch(
        _kernel(cache.dtype),
        slot_mapping.shape[0],
        THREADS,
        q,
        k_nope,
        k_pe,
        kv_c,
        cache,
        slot_mapping,
        *table_or_empty(slot_mapping, positions, cos_sin),
        q_out,
        k_out,
        not in_place(q, q_out),
    )
