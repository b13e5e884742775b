"""Prefill in Numba, an element or a pair at a time, to bits or to codes."""

from __future__ import annotations

import functools
from typing import Any

from sandbox.cache_formats import E4M3
from sandbox.kernels import numba_target
from sandbox.kernels.concat_insert import concat_insert_prefill, concat_insert_prefill_fp8
from sandbox.kernels.concat_insert.launch import in_place
from sandbox.kernels.concat_insert.numba_rows import row_arrays, row_key, without_values
from sandbox.kernels.numba_cache_rows import item_count, item_writer, row_finder
from sandbox.kernels.numba_columns import copier, inverse, product, turner
from sandbox.kernels.numba_target import cuda

THREADS = 64


@functools.cache
def _kernel(coded: bool, *key: Any) -> Any:
    dtype, code = key[2], product(E4M3) if coded else None
    copy, turn, invert = copier(dtype, code), turner(dtype, code), inverse()
    find, write, items = row_finder(), item_writer(*key), item_count(*key[:2])

    @cuda.jit
    def prefill_scalar(
        q,
        k_nope,
        v,
        q_out,
        k_out,
        v_out,
        q_descale,
        k_descale,
        v_descale,
        aside,
        kv_c,
        k_pe,
        cache,
        k_scale,
        slot_mapping,
        positions,
        cos_sin,
    ):
        token, thread, table = cuda.blockIdx.x, cuda.threadIdx.x, (positions, cos_sin)
        heads, nope, width, pairs = q.shape[1], k_nope.shape[2], v.shape[2], k_pe.shape[1] // 2
        by_q, by_k, by_v = invert(q_descale), invert(k_descale), invert(v_descale)
        for item in range(thread, heads * nope, THREADS):
            head, column = item // nope, item % nope
            k_out[token, head, column] = copy(k_nope[token, head, column], by_k)
            if aside:
                q_out[token, head, column] = copy(q[token, head, column], by_q)
        for item in range(thread, heads * pairs, THREADS):
            head, pair = item // pairs, item % pairs
            x, y = k_pe[token, 2 * pair], k_pe[token, 2 * pair + 1]
            x, y = turn(x, y, by_k, pair, token, table)
            even, odd = nope + 2 * pair, nope + 2 * pair + 1
            k_out[token, head, even] = x
            k_out[token, head, odd] = y
            x, y = turn(q[token, head, even], q[token, head, odd], by_q, pair, token, table)
            q_out[token, head, even] = x
            q_out[token, head, odd] = y
        for item in range(thread, heads * width, THREADS):
            head, column = item // width, item % width
            v_out[token, head, column] = copy(v[token, head, column], by_v)
        place, rows = find(token, slot_mapping, cache), (kv_c, k_pe, k_scale)
        if place[0] >= 0:
            for item in range(thread, items, THREADS):
                write(cache, place, item, token, rows, table)

    return prefill_scalar


def _launch(
    coded: bool,
    q: Any,
    k_nope: Any,
    v: Any,
    q_out: Any,
    k_out: Any,
    v_out: Any,
    q_descale: Any,
    k_descale: Any,
    v_descale: Any,
    **arguments: Any,
) -> None:
    numba_target.launch(
        _kernel(coded, *row_key(**arguments)),
        arguments["slot_mapping"].shape[0],
        THREADS,
        *(q, k_nope, v, q_out, k_out, v_out, q_descale, k_descale, v_descale),
        not in_place(q, q_out),
        *row_arrays(**arguments),
    )


@concat_insert_prefill.variant("numba_scalar", kind="numba", preference=5)
def numba_scalar(**arguments: Any) -> None:
    """A block a token, an element or a pair at a time."""
    _launch(False, **arguments, **without_values(**arguments))


@concat_insert_prefill_fp8.variant("numba_scalar", kind="numba", preference=5)
def numba_scalar_fp8(**arguments: Any) -> None:
    """A block a token, an element or a pair at a time."""
    _launch(True, **arguments)
