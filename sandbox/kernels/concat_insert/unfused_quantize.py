"""Heads to codes as a launch of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sandbox.kernels.concat_insert.head_launch import codes_a_store, place
from sandbox.kernels.cuda import CudaKernel

QUANTIZE = CudaKernel(Path(__file__).with_suffix(".cu"), "quantize")
THREADS, IN_FLIGHT, MOST_CODES = 384, 4, 8


def quantize_heads(source: Any, target: Any, descale: Any) -> None:
    """E4M3 codes of `[T, N, columns]` times `1 / descale`."""
    tokens, heads, columns = source.shape
    macros = {
        "THREADS": THREADS,
        "IN_FLIGHT": IN_FLIGHT,
        "COUNT": codes_a_store([source], [target], MOST_CODES),
        "ELEMENT": source.dtype,
        "HEADS": heads,
        "COLUMNS": columns,
    }
    QUANTIZE(tokens, THREADS, *place(source), descale, *place(target), macros=macros)
