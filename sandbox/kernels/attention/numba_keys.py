"""Device functions for Numba kernels: which keys a query of a decode sees, where they are, and what
values they have."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from sandbox.cache_formats import FORMATS, Widths
from sandbox.cache_formats.ds_mla import BFLOAT16
from sandbox.kernels.numba_cache_rows_read import code_bits, code_value, row_views, scale_at
from sandbox.kernels.numba_math import decode, to_float32
from sandbox.kernels.numba_target import cuda


def cache_views(cache: Any, cache_format: str, k_scale: Any) -> tuple[Any, Any, Any]:
    """The cache as `value_reader`'s function takes it."""
    fmt = FORMATS[cache_format]
    return row_views(cache, fmt, 1, k_scale) if fmt.packed else (cache,) * 3


@functools.cache
def value_reader(cache_format: str, widths: Widths) -> Any:
    """Device function `(views, block, offset, column) -> float32`, by `CacheFormat.decode`."""
    fmt = FORMATS[cache_format]
    if not fmt.packed:
        to = to_float32(fmt.storage)

        @cuda.jit(device=True)
        def element(views, block, offset, column):
            return to(views[0][block, offset, column])

        return element
    latent, tiled, bits = widths.L, bool(fmt.tile_scales), code_bits(fmt)
    first_key, in_byte, mask = fmt.fields(widths)["k_pe"].offset // 2, 8 // bits, (1 << bits) - 1
    value_of, scale_of, key_of = code_value(fmt), scale_at(fmt, widths), decode(BFLOAT16)

    @cuda.jit(device=True)
    def restored(views, block, offset, column):
        codes, keys, scales = views
        if tiled and column >= latent:
            return key_of(keys[block, offset, first_key + column - latent])
        byte = np.uint32(codes[block, offset, column // in_byte])
        code = (byte >> np.uint32(column % in_byte * bits)) & np.uint32(mask)
        return np.float32(value_of(code) * scale_of(scales, block, offset, column))

    return restored


def key_finder(mask: str) -> tuple[Any, Any]:
    """How a query finds its keys, by `mask`: `"indices"`, `"tree"`, `"causal"` or `"all"`.

    A pair of device functions. `span(request, query, tokens, block_size, source)` gives the first
    entry that may be a key and the end of those, `find(request, query, entry, tokens, cache,
    source)` the `(block, offset)` of one, negative where it is none. An entry is a position or a
    place in `indices`; `source` is `(block_table, seq_lens, tree_mask, indices, window)`, each
    empty, and the window 0, where the call has none.
    """
    return _chosen_keys() if mask == "indices" else _paged_keys(mask)


@functools.cache
def _chosen_keys() -> tuple[Any, Any]:
    @cuda.jit(device=True)
    def span(request, query, tokens, block_size, source):
        return 0, source[3].shape[2]

    @cuda.jit(device=True)
    def find(request, query, entry, tokens, cache, source):
        indices, block_size = source[3], cache.shape[1]
        if entry >= indices.shape[2]:
            return -1, -1
        slot = np.int64(indices[request, query, entry])
        if slot < 0 or slot >= cache.shape[0] * block_size:
            return -1, -1
        return slot // block_size, slot % block_size

    return span, find


@functools.cache
def _paged_keys(mask: str) -> tuple[Any, Any]:
    causal, tree = mask == "causal", mask == "tree"

    @cuda.jit(device=True)
    def span(request, query, tokens, block_size, source):
        block_table, seq_lens, window = source[0], source[1], source[4]
        length = np.int64(seq_lens[request])
        own = length - tokens + query
        end = min(length, block_table.shape[1] * block_size)
        if causal:
            end = min(end, own + 1)
        return max(0, own - window + 1) if window > 0 else 0, end

    @cuda.jit(device=True)
    def find(request, query, position, tokens, cache, source):
        block_table, seq_lens, tree_mask, window = source[0], source[1], source[2], source[4]
        length = np.int64(seq_lens[request])
        own, new = length - tokens + query, position - (length - tokens)
        column = position // cache.shape[1]
        if position >= length or column >= block_table.shape[1]:
            return -1, -1
        if (causal and position > own) or (window > 0 and position <= own - window):
            return -1, -1
        if tree and new >= 0 and (tree_mask[request, query, new // 32] >> (new % 32)) & 1 == 0:
            return -1, -1
        block = np.int64(block_table[request, column])
        if block < 0 or block >= cache.shape[0]:
            return -1, -1
        return block, position % cache.shape[1]

    return span, find
