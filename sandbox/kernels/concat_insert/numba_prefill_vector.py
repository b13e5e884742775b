"""Prefill in Numba, in words of up to 8 bytes, to bits or to codes."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from sandbox.cache_formats import E4M3
from sandbox.kernels import numba_target
from sandbox.kernels.concat_insert import concat_insert_prefill, concat_insert_prefill_fp8
from sandbox.kernels.concat_insert.launch import in_place
from sandbox.kernels.concat_insert.numba_rows import (
    elements_a_word,
    in_words,
    lanes_for,
    row_arrays_in_words,
    row_words,
    torn_pairs,
    without_values,
)
from sandbox.kernels.numba_cache_rows import row_finder
from sandbox.kernels.numba_cache_words import RowWords, row_writer
from sandbox.kernels.numba_columns import inverse, product, word_copier, word_turner
from sandbox.kernels.numba_target import cuda

GROUPS = 4
HEADS = ("q", "k_nope", "v", "q_out", "k_out", "v_out")
DESCALES = ("q_descale", "k_descale", "v_descale")


@functools.cache
def _kernel(row: RowWords, coded: bool) -> Any:
    code, invert = product(E4M3) if coded else None, inverse()
    copy = word_copier(row.dtype, row.elements, code)
    turn = word_turner(row.dtype, row.elements, code)
    find, (measure, settle, write) = row_finder(), row_writer(row)
    lanes = row.lanes // GROUPS
    scales, shared = row.scales, (row.scales, row.lanes)

    @cuda.jit
    def prefill_vector(
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
        token, lane, group = cuda.blockIdx.x, cuda.threadIdx.x, cuda.threadIdx.y
        heads, nope = k_nope.shape[1], k_nope.shape[2]
        rows, table = (kv_c, k_pe, k_scale), (positions, cos_sin)
        by_q, by_k, by_v = invert(q_descale), invert(k_descale), invert(v_descale)
        for head in range(group, heads, GROUPS):
            for i in range(lane, nope, lanes):
                k_out[token, head, i] = copy(k_nope[token, head, i], by_k)
                if aside:
                    q_out[token, head, i] = copy(q[token, head, i], by_q)
            for i in range(lane, v.shape[2], lanes):
                v_out[token, head, i] = copy(v[token, head, i], by_v)
        for i in range(lane, k_pe.shape[1], lanes):
            key = turn(k_pe[token, i], by_k, i, token, table)
            for head in range(group, heads, GROUPS):
                k_out[token, head, nope + i] = key
                query = turn(q[token, head, nope + i], by_q, i, token, table)
                q_out[token, head, nope + i] = query
        place, thread = find(token, slot_mapping, cache), group * lanes + lane
        if scales:
            peaks = cuda.shared.array(shared, np.uint32)
            measure(peaks, place, thread, token, rows, table)
            cuda.syncthreads()
            settle(peaks, thread)
            cuda.syncthreads()
            write(cache, place, thread, token, rows, table, peaks)
        else:
            write(cache, place, thread, token, rows, table)

    return prefill_vector


def _elements(arguments: dict[str, Any], coded: bool) -> int:
    """Values a word that all columns allow, head parts apart."""
    nope = arguments["k_nope"].shape[2]
    parts = {
        name: [arguments[name][..., :nope], arguments[name][..., nope:]]
        for name in ("q", "q_out", "k_out")
    }
    outputs = [*parts["q_out"], *parts["k_out"], arguments["v_out"]]
    values = [*parts["q"], arguments["k_nope"], arguments["v"]]
    values, codes = (values, outputs) if coded else (values + outputs, [])
    return elements_a_word(arguments, values, codes)


def _launch(coded: bool, arguments: dict[str, Any]) -> None:
    if not arguments["slot_mapping"].shape[0]:  # empty arrays need not divide into words
        return
    elements = _elements(arguments, coded)
    lanes = lanes_for(max(arguments[name].shape[2] for name in HEADS[1:3]), elements)
    row = row_words(elements, lanes * GROUPS, **arguments)
    numba_target.launch(
        _kernel(row, coded),
        arguments["slot_mapping"].shape[0],
        (lanes, GROUPS),
        *(in_words(arguments[name], elements) for name in HEADS),
        *(arguments[name] for name in DESCALES),
        not in_place(arguments["q"], arguments["q_out"]),
        *row_arrays_in_words(row, **arguments),
    )


def _supports(**arguments: Any) -> str | None:
    return torn_pairs(arguments, _elements(arguments | without_values(**arguments), False))


@concat_insert_prefill.variant("numba_vector", kind="numba", preference=8, supports=_supports)
def numba_vector(**arguments: Any) -> None:
    """A block a token, a warp a head in 8-byte words, the key rotated once a warp."""
    _launch(False, arguments | without_values(**arguments))


def _supports_fp8(**arguments: Any) -> str | None:
    return torn_pairs(arguments, _elements(arguments, True), coded=True)


@concat_insert_prefill_fp8.variant(
    "numba_vector", kind="numba", preference=8, supports=_supports_fp8
)
def numba_vector_fp8(**arguments: Any) -> None:
    """A block a token, a warp a head in 8-byte words, the key rotated and encoded once a warp."""
    _launch(True, arguments)
