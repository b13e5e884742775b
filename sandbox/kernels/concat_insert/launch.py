"""What the launchers of the three ops share: the widest access, and arguments in C order."""

from __future__ import annotations

from typing import Any

import numpy as np

from sandbox import arrays


def widest_vector(*pieces: Any) -> int:
    """Bytes of the widest access, 16 at most, that every row of every array allows."""
    together = 16
    for piece in pieces:
        if piece is None or not piece.size:
            continue
        together |= piece.shape[-1] * piece.dtype.itemsize | arrays.address(piece)
        for length, stride in zip(piece.shape[:-1], piece.strides):
            together |= stride if length > 1 else 0
    return together & -together


def table_vector(cos_sin: Any, vector: int, dtype: np.dtype) -> int:
    """Bytes of the widest access to the angles of the pairs in one vector, 4 to 16."""
    pairs = max(1, vector // (2 * dtype.itemsize))
    if cos_sin is None:
        return 4
    half = cos_sin.shape[1] // 2
    return min(4 * pairs, widest_vector(cos_sin[:, :half], cos_sin[:, half:]))


def prefill_vector(arguments: dict[str, Any]) -> int:
    """The widest access that all columns of a prefill allow, head parts apart."""
    nope = arguments["k_nope"].shape[2]
    wholes = [arguments[name] for name in ("q", "q_out", "k_out")]
    halves = [array[..., part] for array in wholes for part in (slice(nope), slice(nope, None))]
    rest = [arguments[name] for name in ("k_nope", "k_pe", "kv_c", "cache")]
    return widest_vector(*halves, *rest)


def decode_vector(arguments: dict[str, Any]) -> int:
    """The widest access that all columns of a decode allow."""
    names = ("ql_nope", "q_pe", "kv_c", "k_pe", "q_out", "cache")
    return widest_vector(*(arguments[name] for name in names))


def insert_arguments(kv_c: Any, k_pe: Any, cache: Any, slot_mapping: Any) -> tuple[Any, ...]:
    """kv_c, k_pe, the cache and the slots, each with its strides in bytes."""
    return (kv_c, kv_c.strides[0], k_pe, k_pe.strides[0], *_cache_arguments(cache), slot_mapping)


def prefill_arguments(
    q: Any,
    k_nope: Any,
    k_pe: Any,
    kv_c: Any,
    cache: Any,
    slot_mapping: Any,
    positions: Any,
    cos_sin: Any,
    q_out: Any,
    k_out: Any,
) -> tuple[Any, ...]:
    return (
        *_heads(q),
        *_heads(k_nope),
        k_pe,
        k_pe.strides[0],
        kv_c,
        kv_c.strides[0],
        *_cache_arguments(cache),
        slot_mapping,
        positions,
        *table_arguments(cos_sin),
        *_heads(q_out),
        *_heads(k_out),
    )


def decode_arguments(
    ql_nope: Any,
    q_pe: Any,
    kv_c: Any,
    k_pe: Any,
    cache: Any,
    slot_mapping: Any,
    positions: Any,
    cos_sin: Any,
    q_out: Any,
) -> tuple[Any, ...]:
    return (
        *_heads(ql_nope),
        *_heads(q_pe),
        *insert_arguments(kv_c, k_pe, cache, slot_mapping),
        positions,
        *table_arguments(cos_sin),
        *_heads(q_out),
    )


def table_arguments(cos_sin: Any) -> tuple[Any, int, int]:
    """The table, its stride in elements, its rows; a null table where nothing is rotated."""
    if cos_sin is None:
        return None, 0, 0
    return cos_sin, cos_sin.strides[0] // 4, cos_sin.shape[0]


def _heads(array: Any) -> tuple[Any, int, int]:
    return array, array.strides[0], array.strides[1]


def _cache_arguments(cache: Any) -> tuple[Any, ...]:
    num_blocks, block_size, _ = cache.shape
    return cache, cache.strides[0], cache.strides[1], block_size, num_blocks * block_size


def in_place(q: Any, q_out: Any) -> bool:
    return arrays.address(q) == arrays.address(q_out)


def warps(threads: int, most: int = 512) -> int:
    """A block size: whole warps for at least `threads`, but no more than `most`."""
    return min(most, -(-threads // 32) * 32)
