"""Decode attention in Numba: a tile of heads a block, which share the keys of a query."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from sandbox.cache_formats import Widths
from sandbox.kernels import numba_target
from sandbox.kernels.attention import decode_attention
from sandbox.kernels.attention.numba_keys import cache_views, key_finder, value_reader
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
from sandbox.kernels.lse import NATURAL, by_request
from sandbox.kernels.numba_columns import array_or_empty, scalar
from sandbox.kernels.numba_math import from_float32
from sandbox.kernels.numba_target import SIMULATED, cuda
from sandbox.kernels.scratch import scratch

# A thread of the simulator is a thread of Python, and a few are enough.
HEADS, KEYS = (4, 4) if SIMULATED else (4, 8)
THREADS = 16 if SIMULATED else 128
INT32 = np.dtype(np.int32)


@functools.cache
def _keeper() -> Any:
    """Device function: what a head's sink leaves of its probabilities; all where it has none."""

    @cuda.jit(device=True)
    def kept(lse, sink, head):
        if sink.shape[0] == 0 or lse == NOTHING:
            return np.float32(1)
        ahead = lse - sink[head]
        less = np.float32(math.exp(-abs(ahead)))
        share = np.float32(1) / (np.float32(1) + less)
        return share if ahead >= np.float32(0) else less * share

    return kept


@functools.cache
def _kernel(
    shape: tuple[int, int], widths: Widths, cache_format: str, mask: str,
    dtype: np.dtype, out_dtype: np.dtype,
) -> Any:  # fmt: skip
    """Attention; `scores_of` and `lses` get what `_mass_kernel` wants to know."""
    rows, keys = shape
    width, latent = widths.L + widths.R, widths.L
    span, find = key_finder(mask)
    read, value = element_reader(dtype), value_reader(cache_format, widths)
    product, largest, weight, add, finish = dot(width), highest(), weigher(), adder(), finisher()
    number, kept, write = scalar(), _keeper(), from_float32(out_dtype)
    stride = width | 1  # columns of an odd stride are in different banks
    zero, one = np.float32(0), np.float32(1)

    @cuda.jit
    def decode_scalar(
        q, codes, key_words, scales, block_table, seq_lens, tree_mask, indices, window,
        q_descale, sink, out, out_lse, scores_of, lses, softmax_scale, from_natural,
    ):  # fmt: skip
        queries = cuda.shared.array((rows, stride), np.float32)
        tile_keys = cuda.shared.array((keys, stride), np.float32)
        seen = cuda.shared.array(keys, np.int32)
        sums = cuda.shared.array((rows, latent), np.float32)
        scores = cuda.shared.array((rows, keys), np.float32)
        weights = cuda.shared.array((rows, keys), np.float32)
        row, lane, tokens, heads = cuda.threadIdx.y, cuda.threadIdx.x, q.shape[1], q.shape[2]
        request, query = cuda.blockIdx.x // tokens, cuda.blockIdx.x % tokens
        head = cuda.blockIdx.y * rows + row
        views = codes, key_words, scales
        source = block_table, seq_lens, tree_mask, indices, window

        for column in range(lane, width, keys):
            if head < heads:
                queries[row, column] = read(q[request, query, head, column])
        for column in range(lane, latent, keys):
            sums[row, column] = zero
        scale = softmax_scale * number(q_descale)
        top, total = NOTHING, zero
        first, end = span(request, query, tokens, codes.shape[1], source)
        for first_key in range(first, end, keys):
            for place in range(row, keys, rows):
                entry = first_key + place
                block, offset = find(request, query, entry, tokens, codes, source)
                if lane == 0:
                    seen[place] = 1 if block >= 0 else 0
                if block >= 0:
                    for column in range(lane, width, keys):
                        tile_keys[place, column] = value(views, block, offset, column)
            cuda.syncthreads()
            score = NOTHING
            if head < heads:
                if seen[lane] > 0:
                    score = scale * product(queries, row, tile_keys, lane)
                if first_key + lane < scores_of.shape[3]:
                    scores_of[request, query, head, first_key + lane] = score
            scores[row, lane] = score
            cuda.syncthreads()
            before = top
            top = largest(scores, row, top)
            shrink = one if top == before else weight(before, top)
            weights[row, lane] = weight(score, top)
            cuda.syncthreads()
            total = add(weights, row, tile_keys, sums, shrink, total)
            cuda.syncthreads()

        if head < heads:
            lse, inverse = finish(top, total)
            inverse = inverse * kept(lse, sink, head)
            for column in range(lane, latent, keys):
                out[request, query, head, column] = write(sums[row, column] * inverse)
            if lane == 0 and out_lse.shape[0] > 0:
                out_lse[request, query, head] = lse * from_natural
            if lane == 0 and lses.shape[0] > 0:
                lses[request, query, head] = lse

    return decode_scalar


@functools.cache
def _mass_kernel(mask: str) -> Any:
    find, weight, kept = key_finder(mask)[1], weigher(), _keeper()
    zero = np.float32(0)

    @cuda.jit
    def mass_scalar(
        scores_of, lses, sink, cache, block_table, seq_lens, tree_mask, indices, window, key_mass
    ):
        source = block_table, seq_lens, tree_mask, indices, window
        tokens, entries = key_mass.shape[1], key_mass.shape[2]
        place = cuda.grid(1)
        if place < key_mass.shape[0] * tokens * entries:
            entry, query = place % entries, place // entries % tokens
            request = place // entries // tokens
            mass = zero
            if find(request, query, entry, tokens, cache, source)[0] >= 0:
                for head in range(lses.shape[2]):
                    lse = lses[request, query, head]
                    probability = weight(scores_of[request, query, head, entry], lse)
                    mass += probability * kept(lse, sink, head)
            key_mass[request, query, entry] = mass

    return mass_scalar


def _tile(width: int, latent: int) -> tuple[int, int] | None:
    def bytes_of(rows: int, keys: int) -> int:
        return 4 * ((rows + keys) * (width | 1) + rows * latent + 2 * rows * keys + keys)

    return tile(HEADS, KEYS, bytes_of)


def _refuses(q: Any, kv_lora_rank: int, **_: Any) -> str | None:
    if _tile(q.shape[3], kv_lora_rank) is None:
        return f"a query and a key of {q.shape[3]} elements exceed shared memory"
    return None


def _mask(causal: bool, tree_mask: Any, indices: Any) -> str:
    if indices is not None:
        return "indices"
    if tree_mask is not None:
        return "tree"
    return "causal" if causal else "all"


@decode_attention.variant("numba_scalar", kind="numba", preference=5, supports=_refuses)
def numba_scalar(
    q: Any,
    cache: Any,
    block_table: Any,
    seq_lens: Any,
    softmax_scale: float,
    kv_lora_rank: int,
    cache_format: str,
    k_scale: Any,
    q_descale: Any,
    causal: bool,
    tree_mask: Any,
    window: int | None,
    indices: Any,
    sink: Any,
    out: Any,
    out_lse: Any,
    lse_base: str,
    lse_layout: str,
    key_mass: Any,
    **_: Any,
) -> None:
    """A block a query and a tile of heads, a thread a head and a key, in float32 all along; masses
    from scores that went through memory."""
    requests, tokens, heads, width = q.shape
    widths = Widths(kv_lora_rank, width - kv_lora_rank)
    mask, shape = _mask(causal, tree_mask, indices), _tile(width, kv_lora_rank)
    source = (
        array_or_empty(block_table, q, 2, INT32),
        array_or_empty(seq_lens, q, dtype=INT32),
        array_or_empty(tree_mask, q, 3, INT32),
        array_or_empty(indices, q, 3, INT32),
        window or 0,
    )
    sink = array_or_empty(sink, q)
    lse = None if out_lse is None else by_request(out_lse, lse_layout, requests, tokens)
    scores_of = lses = None
    if key_mass is not None:
        rows = (requests, tokens, heads)
        scores_of = scratch(q, "decode scores", (*rows, key_mass.shape[2]))
        lses = scratch(q, "decode LSEs", rows)
    numba_target.launch(
        _kernel(shape, widths, cache_format, mask, q.dtype, out.dtype),
        (requests * tokens, -(-heads // shape[0])),
        (shape[1], shape[0]),
        q,
        *cache_views(cache, cache_format, k_scale),
        *source,
        array_or_empty(q_descale, q),
        sink,
        out,
        array_or_empty(lse, q, 3),
        array_or_empty(scores_of, q, 4),
        array_or_empty(lses, q, 3),
        np.float32(softmax_scale),
        np.float32(1 / NATURAL[lse_base]),
    )
    if key_mass is not None:
        blocks = -(-key_mass.size // THREADS)
        known = scores_of, lses, sink, cache
        numba_target.launch(_mass_kernel(mask), blocks, THREADS, *known, *source, key_mass)
