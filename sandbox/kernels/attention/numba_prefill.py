"""Prefill attention in Numba: a tile of queries a block, its keys and values in shared memory."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from sandbox.kernels import numba_target
from sandbox.kernels.attention import prefill_attention
from sandbox.kernels.attention.numba_tiles import (
    NOTHING,
    adder,
    dot,
    element_reader,
    finisher,
    highest,
    tile,
    weigher,
)
from sandbox.kernels.lse import NATURAL, by_token
from sandbox.kernels.numba_columns import array_or_empty, scalar
from sandbox.kernels.numba_math import from_float32
from sandbox.kernels.numba_target import SIMULATED, cuda

# A thread of the simulator is a thread of Python, and a few are enough.
ROWS, KEYS = (2, 4) if SIMULATED else (16, 16)


@functools.cache
def _tile_finder(rows: int) -> Any:
    """Device function: the request of tile number `place`, and its first query in that tile.

    The request after the last one stands for the rows that no request owns; after these -1.
    """

    @cuda.jit(device=True)
    def find(place, cu_seqlens_q, tokens):
        requests = cu_seqlens_q.shape[0] - 1
        for request in range(requests + 1):
            end = cu_seqlens_q[request + 1] if request < requests else tokens
            tiles = (end - cu_seqlens_q[request] + rows - 1) // rows
            if place < tiles:
                return request, place * rows
            place -= tiles
        return -1, 0

    return find


@functools.cache
def _loader(dtype: np.dtype, width: int) -> Any:
    """Device function: `count` rows of a head, from row `first` on, to float32 in shared memory."""
    read = element_reader(dtype)

    @cuda.jit(device=True)
    def load(shared, source, head, first, count):
        thread = cuda.threadIdx.y * cuda.blockDim.x + cuda.threadIdx.x
        count = min(count, shared.shape[0])
        for i in range(thread, count * width, cuda.blockDim.x * cuda.blockDim.y):
            row, column = i // width, i % width
            shared[row, column] = read(source[first + row, head, column])

    return load


@functools.cache
def _kernel(
    rows: int, keys: int, width: int, value_width: int, dtype: np.dtype, out_dtype: np.dtype
) -> Any:
    find, load, load_values = _tile_finder(rows), _loader(dtype, width), _loader(dtype, value_width)
    product, largest, weight, add, finish = dot(width), highest(), weigher(), adder(), finisher()
    number, write = scalar(), from_float32(out_dtype)
    stride = width | 1  # columns of an odd stride are in different banks
    zero, one = np.float32(0), np.float32(1)

    @cuda.jit
    def prefill_scalar(
        q, k, v, cu_seqlens_q, cu_seqlens_k, q_descale, k_descale, v_descale, out, out_lse,
        softmax_scale, from_natural, causal,
    ):  # fmt: skip
        queries = cuda.shared.array((rows, stride), np.float32)
        tile_keys = cuda.shared.array((keys, stride), np.float32)
        values = cuda.shared.array((keys, value_width), np.float32)
        sums = cuda.shared.array((rows, value_width), np.float32)
        scores = cuda.shared.array((rows, keys), np.float32)
        weights = cuda.shared.array((rows, keys), np.float32)
        row, lane, head = cuda.threadIdx.y, cuda.threadIdx.x, cuda.blockIdx.y
        request, first = find(cuda.blockIdx.x, cu_seqlens_q, q.shape[0])
        if request < 0:
            return
        start_q, end_q, start_k, m = cu_seqlens_q[request], q.shape[0], 0, 0
        if request < cu_seqlens_q.shape[0] - 1:
            end_q, start_k = cu_seqlens_q[request + 1], cu_seqlens_k[request]
            m = cu_seqlens_k[request + 1] - start_k
        n = end_q - start_q
        rows_here = min(rows, n - first)

        # The keys that this thread's query sees, and those that the last query of the tile does.
        seen, most = m, m
        if causal:
            seen = min(m, m - n + first + row + 1)
            most = min(m, m - n + first + rows_here)
        if row >= rows_here:
            seen = 0
        if most > 0:
            load(queries, q, head, start_q + first, rows_here)
        for column in range(lane, value_width, keys):
            sums[row, column] = zero
        scale = softmax_scale * number(q_descale) * number(k_descale)
        top, total = NOTHING, zero
        for first_key in range(0, most, keys):
            load(tile_keys, k, head, start_k + first_key, most - first_key)
            load_values(values, v, head, start_k + first_key, most - first_key)
            cuda.syncthreads()
            score = NOTHING
            if first_key + lane < seen:
                score = scale * product(queries, row, tile_keys, lane)
            scores[row, lane] = score
            cuda.syncthreads()
            before = top
            top = largest(scores, row, top)
            shrink = one if top == before else weight(before, top)
            weights[row, lane] = weight(score, top)
            cuda.syncthreads()
            total = add(weights, row, values, sums, shrink, total)
            cuda.syncthreads()

        if row < rows_here:
            token = start_q + first + row
            lse, inverse = finish(top, total)
            inverse = inverse * number(v_descale)
            for column in range(lane, value_width, keys):
                out[token, head, column] = write(sums[row, column] * inverse)
            if lane == 0 and out_lse.shape[0] > 0:
                out_lse[token, head] = lse * from_natural

    return prefill_scalar


def _tile(width: int, value_width: int) -> tuple[int, int] | None:
    def bytes_of(rows: int, keys: int) -> int:
        return 4 * ((rows + keys) * ((width | 1) + value_width) + 2 * rows * keys)

    return tile(ROWS, KEYS, bytes_of)


def _refuses(q: Any, v: Any, **_: Any) -> str | None:
    width, value_width = q.shape[2], v.shape[2]
    if _tile(width, value_width) is None:
        return f"a query, key and value of {width} and {value_width} exceed shared memory"
    return None


@prefill_attention.variant("numba_scalar", kind="numba", preference=5, supports=_refuses)
def numba_scalar(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    softmax_scale: float,
    causal: bool,
    q_descale: Any,
    k_descale: Any,
    v_descale: Any,
    out: Any,
    out_lse: Any,
    lse_base: str,
    lse_layout: str,
    **_: Any,
) -> None:
    """A block a tile of queries and a thread a query and a key, in float32 all along."""
    tokens, heads, width = q.shape
    rows, keys = _tile(width, v.shape[2])
    tiles = tokens // rows + len(cu_seqlens_q) if tokens else 0
    numba_target.launch(
        _kernel(rows, keys, width, v.shape[2], q.dtype, out.dtype),
        (tiles, heads),
        (keys, rows),
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        *(array_or_empty(descale, q) for descale in (q_descale, k_descale, v_descale)),
        out,
        by_token(array_or_empty(out_lse, q, 2), lse_layout),
        np.float32(softmax_scale),
        np.float32(1 / NATURAL[lse_base]),
        bool(causal),
    )
