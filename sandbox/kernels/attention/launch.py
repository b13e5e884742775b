"""What the raw variants of both attentions pass to their kernels."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from sandbox.cache_formats import FORMATS
from sandbox.kernels.attention import FAR
from sandbox.kernels.lse import NATURAL, by_request, by_token
from sandbox.kernels.scratch import scratch
from sandbox.kernels.strides import element_strides


def strides(array: Any, axes: int) -> bytes:
    """`TokenStrides` (2 axes) or `RequestStrides` (3) of `strides.cuh`; zeros for None."""
    if array is None:
        return bytes(8 * axes)
    return struct.pack(f"{axes}q", *element_strides(array)[:axes])


def from_natural(lse_base: str) -> float:
    """What turns a natural logarithm into an LSE of that base."""
    return 1.0 / NATURAL[lse_base]


def token_lse(arguments: Mapping[str, Any]) -> Any:
    """`out_lse` of prefill_attention as `[T, N]`, or None."""
    lse = arguments["out_lse"]
    return None if lse is None else by_token(lse, arguments["lse_layout"])


def request_lse(arguments: Mapping[str, Any]) -> Any:
    """An LSE of decode_attention as `[B, S, N]`: `out_lse`, or where the caller wants none memory
    of its own for what key masses need, or None."""
    requests, tokens, heads, _ = arguments["q"].shape
    if arguments["out_lse"] is not None:
        return by_request(arguments["out_lse"], arguments["lse_layout"], requests, tokens)
    if arguments["key_mass"] is None:
        return None
    return scratch(arguments["q"], "decode LSEs", (requests, tokens, heads))


def key_arguments(arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    """The cache and all that says which keys there are, as every kernel of decode_attention
    declares it: `cache, block_table, seq_lens, tree_mask, indices, layout`."""
    names = ("cache", "block_table", "seq_lens", "tree_mask", "indices")
    return *(arguments[name] for name in names), key_layout(arguments)


def key_layout(arguments: Mapping[str, Any]) -> bytes:
    """`KeyLayout` of `keys.cuh`."""
    cache, table, tree, indices = (
        arguments[name] for name in ("cache", "block_table", "tree_mask", "indices")
    )
    num_blocks, block_size, _ = cache.shape
    window = arguments["window"]
    return struct.pack(
        "7q8i",
        *cache.strides[:2],
        0 if table is None else element_strides(table)[0],
        *((0, 0) if tree is None else element_strides(tree)[:2]),
        *((0, 0) if indices is None else element_strides(indices)[:2]),
        block_size,
        num_blocks,
        0 if table is None else table.shape[1],
        arguments["q"].shape[1],
        FAR if window is None else window,
        arguments["causal"] and tree is None,
        0 if indices is None else indices.shape[2],
        indices is not None,
    )


def latent_macros(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Macros that say what queries and rows of the cache are, as `latent_row.cuh` has it."""
    q, fmt = arguments["q"], FORMATS[arguments["cache_format"]]
    return {
        "FORMAT": fmt.name.upper() if fmt.packed else "PLAIN",
        "ELEMENT": fmt.storage,
        "LATENT": arguments["kv_lora_rank"],
        "ROPE": q.shape[3] - arguments["kv_lora_rank"],
        "QUERY": q.dtype,
    }
