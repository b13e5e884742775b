"""Decode in Numba, in words of up to 8 bytes."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from sandbox.cache_formats import E4M3
from sandbox.kernels import numba_target
from sandbox.kernels.concat_insert import concat_insert_decode
from sandbox.kernels.concat_insert.numba_rows import (
    elements_a_word,
    in_words,
    lanes_for,
    row_arrays_in_words,
    row_words,
    torn_pairs,
)
from sandbox.kernels.numba_cache_rows import row_finder
from sandbox.kernels.numba_cache_words import RowWords, row_writer
from sandbox.kernels.numba_columns import (
    array_or_empty,
    inverse,
    product,
    word_copier,
    word_turner,
)
from sandbox.kernels.numba_target import cuda

GROUPS = 4


@functools.cache
def _kernel(row: RowWords, coded: bool) -> Any:
    code, invert = product(E4M3) if coded else None, inverse()
    copy = word_copier(row.dtype, row.elements, code)
    turn = word_turner(row.dtype, row.elements, code)
    find, (measure, settle, write) = row_finder(), row_writer(row)
    lanes = row.lanes // GROUPS
    scales, shared = row.scales, (row.scales, row.lanes)

    @cuda.jit
    def decode_vector(
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
        token, lane, group = cuda.blockIdx.x, cuda.threadIdx.x, cuda.threadIdx.y
        latent, table = kv_c.shape[1], (positions, cos_sin)
        if cuda.blockIdx.y > 0:
            head, scale = (cuda.blockIdx.y - 1) * GROUPS + group, invert(q_descale)
            if head < q_out.shape[1]:
                for i in range(lane, latent, lanes):
                    q_out[token, head, i] = copy(ql_nope[token, head, i], scale)
                for i in range(lane, k_pe.shape[1], lanes):
                    query = turn(q_pe[token, head, i], scale, i, token, table)
                    q_out[token, head, latent + i] = query
        else:
            place, rows = find(token, slot_mapping, cache), (kv_c, k_pe, k_scale)
            thread = group * lanes + lane
            if scales:
                peaks = cuda.shared.array(shared, np.uint32)
                measure(peaks, place, thread, token, rows, table)
                cuda.syncthreads()
                settle(peaks, thread)
                cuda.syncthreads()
                write(cache, place, thread, token, rows, table, peaks)
            else:
                write(cache, place, thread, token, rows, table)

    return decode_vector


def _elements(arguments: dict[str, Any]) -> int:
    values, q_out = [arguments["ql_nope"], arguments["q_pe"]], arguments["q_out"]
    latent = arguments["kv_c"].shape[1]
    outputs = [q_out[..., :latent], q_out[..., latent:]]
    coded = arguments["q_descale"] is not None
    values, codes = (values, outputs) if coded else (values + outputs, [])
    return elements_a_word(arguments, values, codes)


def _supports(**arguments: Any) -> str | None:
    coded = arguments["q_descale"] is not None
    return torn_pairs(arguments, _elements(arguments), coded)


@concat_insert_decode.variant("numba_vector", kind="numba", preference=8, supports=_supports)
def numba_vector(**arguments: Any) -> None:
    """A warp a head in 8-byte words, pairs rotated inside the word; a block a cache row."""
    if not arguments["slot_mapping"].shape[0]:  # empty arrays need not divide into words
        return
    q_out, elements = arguments["q_out"], _elements(arguments)
    lanes = lanes_for(arguments["kv_c"].shape[1], elements)
    row = row_words(elements, lanes * GROUPS, **arguments)
    numba_target.launch(
        _kernel(row, arguments["q_descale"] is not None),
        (arguments["slot_mapping"].shape[0], 1 + -(-q_out.shape[1] // GROUPS)),
        (lanes, GROUPS),
        *(in_words(arguments[name], elements) for name in ("ql_nope", "q_pe", "q_out")),
        array_or_empty(arguments["q_descale"], q_out),
        *row_arrays_in_words(row, **arguments),
    )
