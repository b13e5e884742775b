"""What the launchers of the concat-insert ops share: widths of access, arguments in C order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sandbox import arrays
from sandbox.cache_formats import FORMATS
from sandbox.kernels.vectors import widest_vector


def table_vector(cos_sin: Any, vector: int, dtype: np.dtype) -> int:
    """Bytes of the widest access to the angles of the pairs in one vector, 4 to 16."""
    pairs = max(1, vector // (2 * dtype.itemsize))
    if cos_sin is None:
        return 4
    half = cos_sin.shape[1] // 2
    return min(4 * pairs, widest_vector(cos_sin[:, :half], cos_sin[:, half:]))


def prefill_vector(arguments: dict[str, Any]) -> int:
    """The widest access that all columns of a prefill allow but the cache's, head parts apart."""
    nope = arguments["k_nope"].shape[2]
    wholes = [arguments[name] for name in ("q", "q_out", "k_out")]
    halves = [array[..., part] for array in wholes for part in (slice(nope), slice(nope, None))]
    rest = [arguments[name] for name in ("k_nope", "k_pe", "kv_c")]
    return widest_vector(*halves, *rest)


def decode_vector(arguments: dict[str, Any]) -> int:
    """The widest access that all columns of a decode allow but the cache's and those of codes."""
    names = ["ql_nope", "q_pe", "kv_c", "k_pe"]
    if arguments["q_descale"] is None:
        names.append("q_out")
    return widest_vector(*(arguments[name] for name in names))


def code_vector(codes: Any, left: int) -> int:
    """The widest access to codes `[..., columns]` whose columns from `left` on stand apart."""
    return widest_vector(codes[..., :left], codes[..., left:])


def format_macros(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What makes a kernel write rows of the cache's format: macros for `insert_row`."""
    name, cache = arguments["cache_format"], arguments["cache"]
    return {
        "FORMAT": name.upper() if FORMATS[name].packed else "PLAIN",
        "POW2": arguments["tile_scale"] == "pow2",
        "CACHE_VECTOR": widest_vector(cache),
    }


def torn_pairs(kv_c: Any, cache_format: str, **arguments: Any) -> str | None:
    """Why `insert_row` cannot write rows of these widths: pieces of a packed row hold pairs."""
    if FORMATS[cache_format].packed and kv_c.shape[1] % 2:
        return f"kv_c's L = {kv_c.shape[1]} is odd, packed rows are written by the pair"
    return None


def insert_arguments(arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    """kv_c, k_pe, the cache, its scale and the slots, each with its strides in bytes."""
    kv_c, k_pe = arguments["kv_c"], arguments["k_pe"]
    rows = (kv_c, kv_c.strides[0], k_pe, k_pe.strides[0])
    return (*rows, *_cache_arguments(arguments), arguments["slot_mapping"])


def prefill_arguments(arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    return (
        *_heads(arguments["q"]),
        *_heads(arguments["k_nope"]),
        *insert_arguments(arguments),
        arguments["positions"],
        *table_arguments(arguments["cos_sin"]),
        *_heads(arguments["q_out"]),
        *_heads(arguments["k_out"]),
    )


def decode_arguments(arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    return (
        *_heads(arguments["ql_nope"]),
        *_heads(arguments["q_pe"]),
        *insert_arguments(arguments),
        arguments["positions"],
        *table_arguments(arguments["cos_sin"]),
        *_heads(arguments["q_out"]),
        arguments["q_descale"],
    )


def table_arguments(cos_sin: Any) -> tuple[Any, int, int]:
    """The table, its stride in elements, its rows; a null table where nothing is rotated."""
    if cos_sin is None:
        return None, 0, 0
    return cos_sin, cos_sin.strides[0] // 4, cos_sin.shape[0]


def _heads(array: Any) -> tuple[Any, int, int]:
    return array, array.strides[0], array.strides[1]


def _cache_arguments(arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    cache = arguments["cache"]
    num_blocks, block_size, _ = cache.shape
    place = (cache, cache.strides[0], cache.strides[1], block_size, num_blocks * block_size)
    return (*place, arguments["k_scale"])


def in_place(q: Any, q_out: Any) -> bool:
    return arrays.address(q) == arrays.address(q_out)


def warps(threads: int, most: int = 512) -> int:
    """A block size: whole warps for at least `threads`, but no more than `most`."""
    return min(most, -(-threads // 32) * 32)
