"""Decode in Numba, an element or a pair at a time."""

from __future__ import annotations

import functools
from typing import Any

from sandbox.cache_formats import E4M3
from sandbox.kernels import numba_target
from sandbox.kernels.concat_insert import concat_insert_decode
from sandbox.kernels.concat_insert.numba_rows import row_arrays, row_key
from sandbox.kernels.numba_cache_rows import item_count, item_writer, row_finder
from sandbox.kernels.numba_columns import array_or_empty, copier, inverse, product, turner
from sandbox.kernels.numba_target import cuda

THREADS = 64


@functools.cache
def _kernel(coded: bool, *key: Any) -> Any:
    dtype, code = key[2], product(E4M3) if coded else None
    copy, turn, invert = copier(dtype, code), turner(dtype, code), inverse()
    find, write, items = row_finder(), item_writer(*key), item_count(*key[:2])

    @cuda.jit
    def decode_scalar(
        ql_nope,
        q_pe,
        q_out,
        q_descale,
        kv_c,
        k_pe,
        cache,
        k_scale,
        slot_mapping,
        positions,
        cos_sin,
    ):
        token, head, thread = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
        latent, table = kv_c.shape[1], (positions, cos_sin)
        if head < q_out.shape[1]:
            scale = invert(q_descale)
            for column in range(thread, latent, THREADS):
                q_out[token, head, column] = copy(ql_nope[token, head, column], scale)
            for pair in range(thread, k_pe.shape[1] // 2, THREADS):
                x, y = q_pe[token, head, 2 * pair], q_pe[token, head, 2 * pair + 1]
                x, y = turn(x, y, scale, pair, token, table)
                q_out[token, head, latent + 2 * pair] = x
                q_out[token, head, latent + 2 * pair + 1] = y
        else:
            place, rows = find(token, slot_mapping, cache), (kv_c, k_pe, k_scale)
            if place[0] >= 0:
                for item in range(thread, items, THREADS):
                    write(cache, place, item, token, rows, table)

    return decode_scalar


@concat_insert_decode.variant("numba_scalar", kind="numba", preference=5)
def numba_scalar(ql_nope: Any, q_pe: Any, q_out: Any, q_descale: Any, **arguments: Any) -> None:
    """A block a head or a cache row, an element or a pair at a time."""
    coded = q_descale is not None
    numba_target.launch(
        _kernel(coded, *row_key(**arguments)),
        (arguments["slot_mapping"].shape[0], q_out.shape[1] + 1),
        THREADS,
        *(ql_nope, q_pe, q_out, array_or_empty(q_descale, q_out)),
        *row_arrays(**arguments),
    )
