"""What the contracts of the ops have in common."""

from __future__ import annotations

from typing import Any

import numpy as np

from sandbox.cache_formats import FORMATS, Widths, format_named
from sandbox.kernels import cache_arguments, require


def rows_to_insert(
    kv_c: Any,
    k_pe: Any,
    cache: Any,
    slot_mapping: Any,
    cache_format: Any,
    k_scale: Any,
    tile_scale: Any,
) -> tuple[int, dict[str, Any]]:
    """Check the arguments that make cache rows.

    Returns:
        The token count, and what replaces arguments: `k_pe` as `[>= T, R]` whatever form it came
        in, the format's name, its scale as an array, its rule for tiles.
    """
    require.array(kv_c, "kv_c", "tokens", "L")
    require.dtype(kv_c, "kv_c", *(fmt.storage for fmt in FORMATS.values() if not fmt.packed))
    require.strided_rows(kv_c, "kv_c")
    if kv_c.shape[1] == 0:
        raise ValueError(f"kv_c has shape {tuple(kv_c.shape)}: L must be positive")
    k_pe = kv_c[:, :0] if k_pe is None else k_pe
    if getattr(k_pe, "ndim", 2) == 3:
        require.array(k_pe, "k_pe", "tokens", "1", "R")
        require.size(k_pe, "k_pe", 1, 1, "all heads share one rotated key")
        k_pe = k_pe[:, 0]
    require.array(k_pe, "k_pe", "tokens", "R")
    require.same_dtype(k_pe, "k_pe", kv_c, "kv_c")
    require.strided_rows(k_pe, "k_pe")
    if k_pe.shape[1] % 2:
        raise ValueError(f"k_pe has shape {tuple(k_pe.shape)}: R must be even")
    require.array(cache, "cache", "num_blocks", "block_size", "row")
    if cache_format is None and cache.dtype != np.uint8:
        require.same_dtype(cache, "cache", kv_c, "kv_c")
    fmt = format_named(cache_format, cache.dtype)
    if not fmt.packed:
        require.same_dtype(cache, "cache", kv_c, "kv_c")
    widths = Widths(kv_c.shape[1], k_pe.shape[1])
    why = f"a {fmt.name} row of kv_c's L = {widths.L} and k_pe's R = {widths.R}"
    require.size(cache, "cache", 2, fmt.row_elements(widths), why)
    require.strided_rows(cache, "cache")
    cache_arguments.aligned(cache, "cache", fmt)
    if cache.shape[1] == 0:
        raise ValueError(f"cache has shape {tuple(cache.shape)}: block_size must be positive")
    require.no_overlap(cache, "cache")
    scale = cache_arguments.cache_scale(fmt, k_scale, cache)
    fmt.check_scales(k_scale, tile_scale)
    if fmt.tile_scales and tile_scale is None:
        tile_scale = fmt.tile_scales[0]
    tokens = token_ids(slot_mapping, "slot_mapping")
    per_token(kv_c, "kv_c", tokens)
    per_token(k_pe, "k_pe", tokens)
    places = require.Memory(cache, "cache")
    for name, value in (("kv_c", kv_c), ("k_pe", k_pe)):
        require.Memory(value, name).apart(places)
    return tokens, {
        "k_pe": k_pe,
        "cache_format": fmt.name,
        "k_scale": scale,
        "tile_scale": tile_scale,
    }


def token_ids(ids: Any, name: str) -> int:
    """An int64 array, one number a token; returns how many."""
    require.array(ids, name, "tokens")
    require.dtype(ids, name, "int64")
    require.strided_rows(ids, name)
    return ids.shape[0]


def per_token(value: Any, name: str, tokens: int) -> None:
    """At least one row a token; a batch padded for a graph has more."""
    require.at_least(value, name, 0, tokens, "one row for each of slot_mapping's slots")


def heads(value: Any, name: str, width: str, kv_c: Any, tokens: int) -> None:
    """An array `[>= T, N, width]` of kv_c's dtype, strided in token and head."""
    require.array(value, name, "tokens", "N", width)
    require.same_dtype(value, name, kv_c, "kv_c")
    require.strided_rows(value, name)
    per_token(value, name, tokens)
    if value.shape[1] == 0:
        raise ValueError(f"{name} has shape {tuple(value.shape)}: N must be positive")


def prefill_heads(
    q: Any, k_nope: Any, k_pe: Any, kv_c: Any, tokens: int, positions: Any, cos_sin: Any
) -> dict[str, Any]:
    """Check the heads of a prefill and its rotation; returns positions and table."""
    heads(k_nope, "k_nope", "P", kv_c, tokens)
    heads(q, "q", "P + R", kv_c, tokens)
    require.size(q, "q", 1, k_nope.shape[1], "k_nope's heads")
    if k_nope.shape[2] == 0:
        raise ValueError(f"k_nope has shape {tuple(k_nope.shape)}: P must be positive")
    require.size(q, "q", 2, k_nope.shape[2] + k_pe.shape[1], "k_nope's P + k_pe's R")
    return rope(positions, cos_sin, k_pe.shape[1], tokens)


def rope(positions: Any, cos_sin: Any, width: int, tokens: int) -> dict[str, Any]:
    """Check positions and their table; both become None where there is nothing to rotate."""
    if (positions is None) != (cos_sin is None):
        missing, given = ("cos_sin", "positions") if cos_sin is None else ("positions", "cos_sin")
        raise ValueError(f"{missing} is missing, but {given} is given: RoPE needs both, NoPE none")
    if positions is None:
        return {"positions": None, "cos_sin": None}
    token_ids(positions, "positions")
    per_token(positions, "positions", tokens)
    require.array(cos_sin, "cos_sin", "max_pos", "R")
    require.dtype(cos_sin, "cos_sin", "float32")
    require.strided_rows(cos_sin, "cos_sin")
    require.at_least(cos_sin, "cos_sin", 0, 1, "a table without a row has no position")
    require.size(cos_sin, "cos_sin", 1, width, "k_pe's R: R / 2 cosines, then R / 2 sines")
    return {"positions": positions, "cos_sin": cos_sin} if width else rope(None, None, 0, tokens)


def output_rows(value: Any, name: str, tokens: int) -> int:
    """Rows of an output: T, or those of the array that the caller gives, at least T."""
    if value is None:
        return tokens
    require.array(value, name, "tokens", "N", "columns")
    require.strided_rows(value, name)
    per_token(value, name, tokens)
    return value.shape[0]


def apart(outputs: dict[str, Any], others: dict[str, Any]) -> None:
    """Outputs of the caller share no memory with anything else, but `q_out` may be q itself."""

    def or_same(output: require.Memory, other: require.Memory) -> bool:
        return (output.name, other.name) == ("q_out", "q")

    # Of two outputs that overlap the error is the later one's.
    require.apart(dict(reversed(outputs.items())), others, or_same)


def values(
    *,
    cache: Any,
    slot_mapping: Any,
    positions: Any = None,
    cos_sin: Any = None,
    **others: Any,
) -> None:
    """Slots within the cache, positions within the table, scales that can be divided by."""
    scales = ("k_scale", "q_descale", "k_descale", "v_descale")
    cache_arguments.positive_scales(**{name: others.get(name) for name in scales})
    tokens = slot_mapping.shape[0]
    capacity = cache.shape[0] * cache.shape[1]
    if tokens and int(slot_mapping.max()) >= capacity:
        raise ValueError(
            f"slot_mapping has slot {int(slot_mapping.max())}, but the cache's {cache.shape[0]} "
            f"blocks of {cache.shape[1]} end at slot {capacity - 1}"
        )
    if tokens and positions is not None:
        used = positions[:tokens]
        if int(used.min()) < 0 or int(used.max()) >= cos_sin.shape[0]:
            raise ValueError(
                f"positions run from {int(used.min())} to {int(used.max())}, but cos_sin has rows "
                f"for 0 to {cos_sin.shape[0] - 1}"
            )
