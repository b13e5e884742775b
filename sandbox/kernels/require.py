"""Checks of an op's arguments: each raises an error that names the argument, before any launch."""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np

from sandbox import arrays

FLOATS = tuple(arrays.DTYPES[name] for name in ("float32", "float16", "bfloat16"))
"""Element types of the ops' numbers."""


def array(value: Any, name: str, *axes: str) -> None:
    """An array with one axis for each name in `axes`."""
    if value is None:
        raise TypeError(f"{name} is missing, expected an array [{', '.join(axes)}]")
    if not arrays.is_array(value):
        raise TypeError(f"{name} is {type(value).__name__}, expected an array")
    if value.ndim != len(axes):
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}, expected {len(axes)} axes [{', '.join(axes)}]"
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
    item = value.dtype.itemsize
    if value.size and value.shape[-1] > 1 and value.strides[-1] != item:
        raise ValueError(
            f"{name} has a last axis of stride {value.strides[-1]} bytes, "
            f"expected contiguous ({item})"
        )
    whole_strides(value, name)


def whole_strides(value: Any, name: str) -> None:
    """Strides that are whole elements and not negative."""
    item = value.dtype.itemsize
    for length, stride in zip(value.shape, value.strides):
        if value.size and length > 1 and (stride < 0 or stride % item):
            raise ValueError(
                f"{name} has strides {value.strides}, expected whole elements of {item} bytes and "
                "none negative"
            )


def no_overlap(value: Any, name: str) -> None:
    """An array to be written whose elements each have memory of their own."""
    reach = value.dtype.itemsize
    for stride, length in sorted((abs(s), n) for n, s in zip(value.shape, value.strides) if n > 1):
        if value.size and stride < reach:
            raise ValueError(f"{name} has strides {value.strides}: its elements share memory")
        reach += stride * (length - 1)


def output(
    value: Any, name: str, shape: tuple[int, ...], dtype: np.dtype, any_strides: bool = False
) -> None:
    """An array to be written; with `any_strides` its last axis need not be contiguous."""
    if not arrays.is_array(value):
        raise TypeError(f"{name} is {type(value).__name__}, expected an array")
    if value.dtype != dtype:
        raise TypeError(f"{name} is {value.dtype}, expected {dtype}")
    if tuple(value.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(value.shape)}, expected {shape}")
    if any_strides:
        whole_strides(value, name)
    else:
        strided_rows(value, name)
    no_overlap(value, name)


def named_dtype(asked: Any, name: str, allowed: Iterable[np.dtype]) -> np.dtype:
    """The dtype that the caller means: a NumPy dtype, its name, or torch's of that name."""
    allowed = list(allowed)
    for dtype in allowed:
        if str(asked).removeprefix("torch.") == dtype.name or asked == dtype:
            return dtype
    names = ", ".join(dtype.name for dtype in allowed)
    raise TypeError(f"{name} is {asked!r}, expected one of {names}")


class Memory:
    """Where the elements of a NumPy or CuPy array lie; strides must not be negative."""

    __slots__ = ("array", "end", "name", "start")

    def __init__(self, array: Any, name: str) -> None:
        self.array, self.name = array, name
        self.start = self.end = arrays.address(array)
        if array.size:
            self.end += array.dtype.itemsize
            for length, stride in zip(array.shape, array.strides):
                self.end += (length - 1) * stride

    def apart(self, other: Memory, *, or_same: bool = False) -> None:
        """No element shared with another array; with `or_same` the two may be one and the same."""
        if self.end <= other.start or other.end <= self.start:
            return
        if or_same and self._places() == other._places():
            return
        try:
            shared = np.shares_memory(self._shadow(), other._shadow(), max_work=100_000)
        except np.exceptions.TooHardError:
            shared = True
        if shared:
            allowed = f"; it may be {other.name} itself" if or_same else ""
            raise ValueError(f"{self.name} shares memory with {other.name}{allowed}")

    def _places(self) -> tuple[Any, ...]:
        steps = [(n, s) for n, s in zip(self.array.shape, self.array.strides) if n > 1]
        return self.start, self.array.dtype, tuple(self.array.shape), steps

    def _shadow(self) -> np.ndarray:
        """A NumPy array at the same addresses, never to be touched."""
        shadow = SimpleNamespace(
            __array_interface__={
                "version": 3,
                "data": (self.start, False),
                "shape": tuple(self.array.shape),
                "strides": tuple(self.array.strides),
                "typestr": f"|V{self.array.dtype.itemsize}",
            }
        )
        return np.asarray(shadow)


def apart(
    outputs: dict[str, Any],
    others: dict[str, Any],
    or_same: Callable[[Memory, Memory], bool] = lambda output, other: False,
) -> None:
    """The outputs that the caller gives share no memory with each other or with other arrays.

    `or_same(output, other)` says which two may be one and the same array. None is skipped.
    """
    written = [Memory(value, name) for name, value in outputs.items() if value is not None]
    if not written:
        return
    read = [Memory(value, name) for name, value in others.items() if arrays.is_array(value)]
    for output in written:
        for other in read:
            output.apart(other, or_same=or_same(output, other))
    for one, other in itertools.combinations(written, 2):
        one.apart(other)


def outputs(
    given: dict[str, Any],
    axes: dict[str, Iterable[str]],
    others: dict[str, Any],
    or_same: Callable[[Memory, Memory], bool] = lambda output, other: False,
) -> None:
    """The outputs that the caller gives have the rank of `axes`, whole strides, and are `apart`.

    None is skipped.
    """
    for name, value in given.items():
        if value is not None:
            array(value, name, *axes[name])
            whole_strides(value, name)
    apart(given, others, or_same)


def rows(value: Any, name: str, width: str) -> None:
    """Numbers `[tokens, width]`, rows of which may be strided and none is empty."""
    array(value, name, "tokens", width)
    dtype(value, name, *FLOATS)
    strided_rows(value, name)
    if value.shape[1] == 0:
        raise ValueError(f"{name} has shape {tuple(value.shape)}: {width} must be positive")


def one_of(value: Any, name: str, allowed: Iterable[Any]) -> None:
    allowed = list(allowed)
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}, expected one of {allowed}")


def flag(value: Any, name: str) -> None:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} is {type(value).__name__}, expected a bool")


def integer(value: Any, name: str, least: int = 0) -> int:
    """A whole number, as an int."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} is {type(value).__name__}, expected an integer")
    if value < least:
        raise ValueError(f"{name} is {value}, expected at least {least}")
    return int(value)


def number(value: Any, name: str) -> float:
    """A real number of the host, as a float32 can hold it: infinite where it is too large."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {type(value).__name__}, expected a number")
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def not_negative(value: Any, name: str) -> float:
    """As `number`, finite and 0 or more."""
    found = number(value, name)
    if not 0 <= found < math.inf:
        raise ValueError(f"{name} is {value}, expected a finite number of 0 or more")
    return found
