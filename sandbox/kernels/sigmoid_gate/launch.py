"""What the raw variants of sigmoid_gate pass to their kernels."""

from __future__ import annotations

from typing import Any


def row_arrays(*rows: Any) -> list[Any]:
    """Each array and its elements between rows, in C order."""
    return [part for each in rows for part in (each, each.strides[0] // each.dtype.itemsize)]
