"""How far apart things lie in an array, in elements, as kernels are told it."""

from __future__ import annotations

from typing import Any


def element_strides(array: Any) -> tuple[int, ...]:
    """Elements from one to the next along each axis."""
    return tuple(stride // array.dtype.itemsize for stride in array.strides)


def row_arrays(*rows: Any) -> list[Any]:
    """Each array and its elements from row to row, in C order."""
    return [part for each in rows for part in (each, element_strides(each)[0])]
