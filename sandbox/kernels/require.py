"""Checks of an op's arguments: each raises an error that names the argument, before any launch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np


def array(value: Any, name: str, *axes: str) -> None:
    """An array with one axis for each name in `axes`."""
    if value is None:
        raise TypeError(f"{name} is missing, expected an array [{', '.join(axes)}]")
    if not hasattr(value, "strides"):
        raise TypeError(f"{name} is {type(value).__name__}, expected an array")
    if value.ndim != len(axes):
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}, expected {len(axes)} axes "
            f"[{', '.join(axes)}]"
        )


def dtype(value: Any, name: str, *allowed: np.dtype | type) -> None:
    if value.dtype not in [np.dtype(each) for each in allowed]:
        known = " or ".join(np.dtype(each).name for each in allowed)
        raise TypeError(f"{name} is {value.dtype}, expected {known}")


def same_dtype(value: Any, name: str, other: Any, other_name: str) -> None:
    if value.dtype != other.dtype:
        raise TypeError(f"{name} is {value.dtype}, expected {other.dtype} as {other_name}")


def size(value: Any, name: str, axis: int, expected: int, why: str) -> None:
    if value.shape[axis] != expected:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}, expected {expected} on axis {axis}: {why}"
        )


def at_least(value: Any, name: str, axis: int, least: int, why: str) -> None:
    if value.shape[axis] < least:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}, expected at least {least} on axis {axis}: "
            f"{why}"
        )


def strided_rows(value: Any, name: str) -> None:
    """A contiguous last axis and, elsewhere, strides that are whole elements and not negative."""
    if not value.size:
        return
    item = value.dtype.itemsize
    if value.shape[-1] > 1 and value.strides[-1] != item:
        raise ValueError(
            f"{name} has a last axis of stride {value.strides[-1]} bytes, expected contiguous ({item})"
        )
    for length, stride in zip(value.shape, value.strides):
        if length > 1 and (stride < 0 or stride % item):
            raise ValueError(
                f"{name} has strides {value.strides}, expected whole elements of {item} bytes and "
                "none negative"
            )


def one_of(value: Any, name: str, allowed: Iterable[Any]) -> None:
    allowed = list(allowed)
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}, expected one of {allowed}")


def integer(value: Any, name: str, least: int = 0) -> int:
    """A whole number, as an int."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} is {type(value).__name__}, expected an integer")
    if value < least:
        raise ValueError(f"{name} is {value}, expected at least {least}")
    return int(value)


def element_strides(value: Any) -> tuple[int, ...]:
    """Strides in elements, one for each axis; 0 for an axis of length 1 is as good as any."""
    return tuple(stride // value.dtype.itemsize for stride in value.strides)
