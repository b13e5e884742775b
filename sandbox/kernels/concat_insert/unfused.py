"""The parts that fusion joins, as launches of their own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sandbox.cache_formats import FORMATS, Widths
from sandbox.kernels.concat_insert.launch import (
    format_macros,
    table_arguments,
    table_vector,
    torn_pairs,
)
from sandbox.kernels.concat_insert.raw_insert_vector import raw_vector
from sandbox.kernels.cuda import CudaKernel
from sandbox.kernels.vectors import widest_vector

COPY = CudaKernel(Path(__file__).with_name("unfused_copy.cu"), "copy_columns")
ROPE = CudaKernel(Path(__file__).with_name("unfused_rope.cu"), "rope_columns")
THREADS = 256


def copy_columns(source: Any, target: Any) -> None:
    """Copy `[T, N, columns]`, any strides; source may have one head for all."""
    tokens, heads, columns = target.shape
    macros = {
        "THREADS": THREADS,
        "VECTOR": widest_vector(source, target),
        "HEADS": heads,
        "COLUMN_BYTES": columns * target.dtype.itemsize,
    }
    COPY(tokens * (columns > 0), THREADS, *_heads(source), *_heads(target), macros=macros)


def rope_columns(
    source: Any, target: Any, positions: Any, cos_sin: Any, descale: Any = None
) -> None:
    """Rotate `[T, N, R]`, or not without positions, into target, or into E4M3 codes with a descale;
    source may have one head."""
    if positions is None and descale is None:
        copy_columns(source, target)
    else:
        strides = target.strides[:2]
        _rope(source, target, strides, positions, cos_sin, descale, fp8=descale is not None)


def insert_rotated(arguments: Mapping[str, Any]) -> None:
    """Two launches: insert the rows as they are, then rotate k_pe into its columns of them."""
    names = ("kv_c", "k_pe", "cache", "slot_mapping", "cache_format", "k_scale", "tile_scale")
    raw_vector(**{name: arguments[name] for name in names})
    if arguments["positions"] is None:
        return
    k_pe, cache, slots = arguments["k_pe"], arguments["cache"], arguments["slot_mapping"]
    widths = Widths(arguments["kv_c"].shape[1], k_pe.shape[1])
    key = FORMATS[arguments["cache_format"]].fields(widths)["k_pe"]
    first, size = (n // cache.dtype.itemsize for n in (key.offset, key.nbytes))
    target = cache[..., first : first + size]
    num_blocks, block_size, _ = cache.shape
    _rope(
        k_pe[: slots.shape[0], None],
        target,
        target.strides[:2],
        arguments["positions"],
        arguments["cos_sin"],
        arguments["k_scale"],
        slots=(slots, block_size, num_blocks * block_size),
        form=format_macros(arguments)["FORMAT"],
    )


def apart_refuses(cache_format: str, positions: Any, **arguments: Any) -> str | None:
    """Why rows of this format cannot be inserted first and their keys rotated after that."""
    if positions is not None and cache_format.endswith("_per_token"):
        return (
            f"{cache_format} has a scale of the whole rotated key: rotating it apart would "
            "round it twice"
        )
    return torn_pairs(cache_format=cache_format, **arguments)


def _rope(
    source: Any,
    target: Any,
    strides: tuple[int, int],
    positions: Any,
    cos_sin: Any,
    scale: Any = None,
    *,
    fp8: bool = False,
    slots: tuple[Any, int, int] = (None, 1, 0),
    form: str = "PLAIN",
) -> None:
    tokens, _, width = source.shape
    vector = widest_vector(source)
    macros = {
        "THREADS": THREADS,
        "VECTOR": vector,
        "TARGET_VECTOR": widest_vector(target),
        "TARGET_BYTES": target.shape[2] * target.dtype.itemsize,
        "TABLE_VECTOR": table_vector(cos_sin, vector, source.dtype),
        "ELEMENT": source.dtype,
        "HEADS": 1 if slots[0] is not None else target.shape[1],
        "ROPE": width,
        "FP8_QUERY": fp8,
        "FORMAT": form,
    }
    place = (target, *strides, scale, *slots)
    table = (positions, *table_arguments(cos_sin))
    ROPE(tokens * (width > 0), THREADS, *_heads(source), *table, *place, macros=macros)


def _heads(array: Any) -> tuple[Any, int, int]:
    return array, array.strides[0], array.strides[1] if array.shape[1] > 1 else 0
