"""The parts that fusion joins, as launches of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sandbox.kernels.concat_insert.launch import table_arguments, table_vector, widest_vector
from sandbox.kernels.cuda import CudaKernel

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


def rope_columns(source: Any, target: Any, positions: Any, cos_sin: Any) -> None:
    """Rotate `[T, N, R]` into target, or copy it without positions; source may have one head."""
    if positions is None:
        copy_columns(source, target)
        return
    strides = target.strides[:2]
    _rope(source, target, target.shape, strides, positions, cos_sin, None, (1, 0))


def rope_cached(k_pe: Any, cache: Any, slot_mapping: Any, positions: Any, cos_sin: Any) -> None:
    """Rotate `[T, R]` into the last columns of the cache's rows; nothing without positions."""
    if positions is None:
        return
    num_blocks, block_size, _ = cache.shape
    target = cache[..., cache.shape[2] - k_pe.shape[1] :]
    shape = (slot_mapping.shape[0], 1, k_pe.shape[1])
    place = (block_size, num_blocks * block_size)
    source = k_pe[:, None]
    _rope(source, target, shape, cache.strides[:2], positions, cos_sin, slot_mapping, place)


def _rope(
    source: Any,
    target: Any,
    shape: tuple[int, int, int],
    strides: tuple[int, int],
    positions: Any,
    cos_sin: Any,
    slot_mapping: Any,
    place: tuple[int, int],
) -> None:
    tokens, heads, width = shape
    vector = widest_vector(source, target)
    macros = {
        "THREADS": THREADS,
        "VECTOR": vector,
        "TABLE_VECTOR": table_vector(cos_sin, vector, target.dtype),
        "ELEMENT": target.dtype,
        "HEADS": heads,
        "ROPE": width,
    }
    arguments = (*_heads(source), positions, *table_arguments(cos_sin), target, *strides)
    ROPE(tokens, THREADS, *arguments, slot_mapping, *place, macros=macros)


def _heads(array: Any) -> tuple[Any, int, int]:
    return array, array.strides[0], array.strides[1] if array.shape[1] > 1 else 0
