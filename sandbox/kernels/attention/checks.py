"""Checks of the arguments of both attentions."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from sandbox import arrays
from sandbox.cache_formats import FORMATS, format_named
from sandbox.kernels import cache_arguments, require
from sandbox.kernels.op import Output

CODES = np.dtype(np.uint8)
"""Element type of E4M3 codes."""


def softmax_scale(value: Any) -> float:
    """The scale of the scores, as a float32 can hold it."""
    found = require.number(value, "softmax_scale")
    if not 0 < found < math.inf:
        raise ValueError(f"softmax_scale is {value}, expected a positive and finite number")
    return found


def heads(value: Any, name: str, *axes: str) -> None:
    """Queries, keys or values: numbers or E4M3 codes, whose last axis is contiguous."""
    require.array(value, name, *axes)
    require.dtype(value, name, *require.FLOATS, CODES)
    require.strided_rows(value, name)
    if value.shape[-1] == 0 or value.shape[-2] == 0:
        raise ValueError(f"{name} has shape {tuple(value.shape)}: {axes[-2:]} must not be empty")


def descale(value: Any, name: str, codes: Any, codes_name: str) -> Any:
    """The descale of codes, which need one, or None for numbers, which must not have one."""
    if codes.dtype == CODES:
        return cache_arguments.scale(value, name, codes)
    if value is not None:
        raise ValueError(f"{name} is given, but {codes_name} is {codes.dtype}, not codes")
    return None


def bounds(value: Any, name: str, requests: int | None) -> int:
    """Row bounds of requests; returns how many there are."""
    require.array(value, name, "requests + 1")
    require.dtype(value, name, "int32")
    require.strided_rows(value, name)
    if value.shape[0] == 0:
        raise ValueError(f"{name} is empty, expected one more entry than there are requests")
    if requests is not None:
        require.size(value, name, 0, requests + 1, "as many as cu_seqlens_q has")
    return value.shape[0] - 1


def output_dtype(asked: Any, out: Any, q: Any) -> np.dtype:
    """Element type of the result: what is asked for, or out's, or q's, bfloat16 for codes."""
    if asked is not None:
        return require.named_dtype(asked, "out_dtype", require.FLOATS)
    if out is not None:
        require.dtype(out, "out", *require.FLOATS)
        return out.dtype
    return arrays.bfloat16 if q.dtype == CODES else q.dtype


def outputs(
    specs: dict[str, Output], given: dict[str, Any], inputs: dict[str, Any]
) -> dict[str, Output]:
    """Outputs that the caller gave must have memory of their own; returns `specs`."""
    axes = {name: map(str, spec.shape) for name, spec in specs.items()}
    require.outputs(given, axes, inputs)
    return specs


def non_decreasing(bounds: Any, name: str, rows: int, *, from_zero: bool = False) -> None:
    """Values of row bounds, of arrays that can be read here."""
    found = bounds.tolist()
    if found[0] < 0 or any(a > b for a, b in itertools.pairwise(found)):
        raise ValueError(f"{name} must not decrease and must not start below 0")
    if from_zero and found[0] != 0:
        raise ValueError(f"{name} starts at {found[0]}, expected 0")
    if found[-1] > rows:
        raise ValueError(f"{name} ends at {found[-1]}, but there are {rows} rows")


def cache(
    cache: Any, cache_format: Any, k_scale: Any, kv_lora_rank: Any, width: int
) -> dict[str, Any]:
    """A paged cache of any format whose rows have `width` values; what replaces its arguments."""
    require.array(cache, "cache", "num_blocks", "block_size", "row")
    require.dtype(cache, "cache", *dict.fromkeys(fmt.storage for fmt in FORMATS.values()))
    require.strided_rows(cache, "cache")
    if cache.shape[1] == 0 or cache.shape[2] == 0:
        raise ValueError(f"cache has shape {cache.shape}: block_size and rows must not be empty")
    fmt = format_named(cache_format, cache.dtype)
    cache_arguments.aligned(cache, "cache", fmt)
    scale = cache_arguments.cache_scale(fmt, k_scale, cache)
    L = require.integer(kv_lora_rank, "kv_lora_rank", least=1)
    if width < L:
        raise ValueError(f"kv_lora_rank is {L}, but q has only {width} columns")
    try:
        found = fmt.widths(cache.shape[2], L)
    except ValueError as failure:
        raise ValueError(f"cache has shape {tuple(cache.shape)}: {failure}") from None
    if width != found.L + found.R:
        raise ValueError(
            f"q has {width} columns, but rows of {fmt.name} in this cache have {found.L + found.R}"
        )
    return {"cache_format": fmt.name, "k_scale": scale, "kv_lora_rank": L}


def paged(block_table: Any, seq_lens: Any, requests: int) -> None:
    require.array(block_table, "block_table", "requests", "columns")
    require.dtype(block_table, "block_table", "int32")
    require.strided_rows(block_table, "block_table")
    require.size(block_table, "block_table", 0, requests, "one row for each of q's requests")
    require.array(seq_lens, "seq_lens", "requests")
    require.dtype(seq_lens, "seq_lens", "int32")
    require.strided_rows(seq_lens, "seq_lens")
    require.size(seq_lens, "seq_lens", 0, requests, "one for each of q's requests")


def sparse(indices: Any, requests: int, tokens: int, **others: Any) -> None:
    """`indices` in the place of a block table, with nothing that speaks of positions."""
    for name, value in others.items():
        if value is not None:
            raise ValueError(f"{name} is given, but indices say which keys there are")
    require.array(indices, "indices", "requests", "tokens", "keys")
    require.dtype(indices, "indices", "int32")
    require.strided_rows(indices, "indices")
    if tuple(indices.shape[:2]) != (requests, tokens):
        raise ValueError(
            f"indices has shape {tuple(indices.shape)}, expected ({requests}, {tokens}, keys)"
        )


def tree(tree_mask: Any, requests: int, tokens: int) -> None:
    require.array(tree_mask, "tree_mask", "requests", "tokens", "words")
    require.dtype(tree_mask, "tree_mask", "int32")
    require.strided_rows(tree_mask, "tree_mask")
    expected = (requests, tokens, -(-tokens // 32))
    if tuple(tree_mask.shape) != expected:
        raise ValueError(
            f"tree_mask has shape {tuple(tree_mask.shape)}, expected {expected}: "
            "a bit for each new token, 32 to a word"
        )
