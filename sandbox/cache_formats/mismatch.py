"""What a writer or a reader gave for conformance vectors, beside what it should have given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from sandbox.cache_formats import suspects
from sandbox.cache_formats.format import Field
from sandbox.cache_formats.suspects import elements
from sandbox.cache_formats.vectors import Vectors

ROWS_SUSPECTED = 8


@dataclass(frozen=True)
class Mismatch:
    """The first place where something differs, and how many there are.

    Attributes:
        what: what is wrong, in words.
        field: name of the row's field; empty where the whole answer is unusable.
        row, column: row of the vectors, and element of the field (of the row, for a reader).
        got, expected: bytes in hex and, in parentheses, the values that they mean.
        suspicion: a known mistake that gives exactly these bytes or values; or empty.
    """

    what: str
    field: str = ""
    row: int = -1
    column: int = -1
    got: str = ""
    expected: str = ""
    suspicion: str = ""

    def __str__(self) -> str:
        place = f", first in row {self.row}, column {self.column}" if self.field else ""
        pair = f": got {self.got}, expected {self.expected}" if self.field else ""
        likely = f". Likely it {self.suspicion}" if self.suspicion else ""
        return f"{self.what}{place}{pair}{likely}"


def compare_stored(vectors: Vectors, got: Any) -> Mismatch | None:
    """What is wrong with the bytes that a writer stored, or None.

    Bytes must be equal. Only a NaN scale or bf16 key may be another NaN than the expected one.

    Args:
        got: uint8 `[T, row bytes]`, NumPy.
    """
    if unusable := _unusable(got, vectors.stored.shape, (np.dtype(np.uint8),)):
        return Mismatch(unusable)
    fields = vectors.format.layout(vectors.widths)
    for field in sorted(fields, key=lambda field: "scale" not in field.name):
        mine, right = (elements(rows, field) for rows in (got, vectors.stored))
        wrong = _bits(mine) != _bits(right)
        if vectors.format.packed and field.dtype.itemsize > 1:
            wrong &= ~(np.isnan(mine.astype(np.float32)) & np.isnan(right.astype(np.float32)))
        if wrong.any():
            return _wrong_field(vectors, got, field, wrong, (mine, right))
    return None


def compare_values(vectors: Vectors, got: Any) -> Mismatch | None:
    """What is wrong with the values that a reader gave, or None.

    They must be the float32 values, rounded once if they have fewer bits; a NaN may be any NaN.

    Args:
        got: float32, float16, bfloat16 or float64 `[T, L + R]`, NumPy.
    """
    floats = ("float32", "float16", "bfloat16", "float64")
    if unusable := _unusable(got, vectors.values.shape, floats):
        return Mismatch(unusable)
    with np.errstate(all="ignore"):
        right = vectors.values.astype(got.dtype)
    got = np.ascontiguousarray(got)
    wrong = (_bits(got) != _bits(right)) & ~(np.isnan(got) & np.isnan(right))
    if not wrong.any():
        return None
    row, column = _first(wrong)
    name, stored = _stored_at(vectors, row, column)
    return Mismatch(
        f"{int(wrong.sum())} of {wrong.size} values wrong",
        name,
        row,
        column,
        f"{got[row, column]:.9g}",
        f"{right[row, column]:.9g} ({stored})",
        _suspicion(suspects.of_reader, vectors, got, wrong),
    )


def _unusable(got: Any, shape: tuple[int, ...], dtypes: tuple[Any, ...]) -> str:
    if not isinstance(got, np.ndarray):
        return f"returned {type(got).__name__}, expected an array"
    if got.dtype not in dtypes:
        return f"returned {got.dtype}, expected {' or '.join(map(str, dtypes))}"
    if got.shape != shape:
        return f"returned an array of shape {got.shape}, expected {shape}"
    return ""


def _bits(array: Any) -> Any:
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


def _first(wrong: Any) -> tuple[int, int]:
    row, column = (int(axis[0]) for axis in np.nonzero(wrong))
    return row, column


def _suspicion(known: Callable[[Vectors, Any], str], vectors: Vectors, got: Any, wrong: Any) -> str:
    """The mistake that explains most of the wrong rows, of which a few are looked at."""
    rows = np.flatnonzero(wrong.any(axis=1))
    few = rows[np.linspace(0, len(rows) - 1, min(len(rows), ROWS_SUSPECTED)).astype(int)]
    found = Counter(known(vectors.take([row]), got[row]) for row in few)
    return found.most_common(1)[0][0]


def _wrong_field(
    vectors: Vectors, got: Any, field: Field, wrong: Any, pair: tuple[Any, Any]
) -> Mismatch:
    row, column = _first(wrong)
    sides = [
        f"{side[row, column].tobytes().hex(' ')} ({meaning})"
        for side, meaning in zip(pair, _meanings(vectors, got, field, row, column))
    ]
    return Mismatch(
        f"{int(wrong.sum())} of {wrong.size} elements of {field.name} wrong",
        field.name,
        row,
        column,
        *sides,
        _suspicion(suspects.of_writer, vectors, got, wrong),
    )


def _meanings(vectors: Vectors, got: Any, field: Field, row: int, column: int) -> Iterator[str]:
    """What one element means, in the row that was got and in the one that was expected."""
    fmt, dims = vectors.format, vectors.widths
    for rows in (got, vectors.stored):
        if "scale" in field.name:
            yield f"{elements(rows, field)[row, column]:.9g}"
            continue
        stored = np.ascontiguousarray(rows[row : row + 1]).view(fmt.storage)
        values = fmt.decode(stored, dims, k_scale=vectors.k_scale)[0]
        part = values[: dims.L] if field.name == "kv_c" else values[dims.L :]
        each = len(part) // field.count
        yield " and ".join(f"{x:.9g}" for x in part[column * each : (column + 1) * each])


def _stored_at(vectors: Vectors, row: int, column: int) -> tuple[str, str]:
    """The field that a column of values is in, and the bytes it is stored as."""
    fields = vectors.format.fields(vectors.widths)
    name, place = ("kv_c", column) if column < vectors.L else ("k_pe", column - vectors.L)
    field = fields[name]
    values = vectors.L if name == "kv_c" else vectors.R
    element = elements(vectors.stored, field)[row, place * field.count // values]
    return name, f"stored {element.tobytes().hex(' ')} in {name}"
