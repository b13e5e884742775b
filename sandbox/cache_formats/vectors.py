"""Conformance vectors: rows, the bytes that every writer stores, the values that every reader has.

`load()` reads the file that is part of the package, where bf16 stands as uint16 and nothing is left
to be computed. `python -m sandbox.cache_formats.vectors` writes it again, the same bytes on every
run, from the rows of `vector_rows` and the exact formats.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from sandbox.cache_formats import FORMATS, CacheFormat, Widths, vector_rows

VERSION = 1
FILE = Path(__file__).with_name("vectors") / "vectors.npz"
PARTS = ("rows", "stored", "values")
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True, eq=False)
class Vectors:
    """Rows of one format under one set of scales, and what becomes of them.

    Attributes:
        cache_format: name of the format.
        name: what the rows are about.
        L, R: values of the latent and of the key in a row.
        k_scale: descale of a format that has one for the tensor, to be taken as float32.
        tile_scale: rule by which a writer chooses scales of tiles, `"pow2"` or `"raw"`.
        rows: `[T, L + R]` bfloat16, float16 or float32 for a writer; None: for readers only.
        stored: uint8 `[T, row bytes]`.
        values: float32 `[T, L + R]`, what a reader has before it rounds to its output.
    """

    cache_format: str
    name: str
    L: int
    R: int
    k_scale: float | None
    tile_scale: str | None
    rows: Any
    stored: Any
    values: Any

    @property
    def format(self) -> CacheFormat:
        return FORMATS[self.cache_format]

    @property
    def widths(self) -> Widths:
        return Widths(self.L, self.R)

    @property
    def label(self) -> str:
        """Unique within the file."""
        scale = "" if self.k_scale is None else f"k_scale={self.k_scale:g}"
        parts = (self.cache_format, self.name, f"{self.L}+{self.R}", scale, self.tile_scale)
        return "/".join(filter(None, parts))

    def take(self, picked: Any) -> Vectors:
        """Some of the rows, by their numbers."""
        rows = None if self.rows is None else self.rows[picked]
        return replace(self, rows=rows, stored=self.stored[picked], values=self.values[picked])


@functools.cache
def load(path: Path = FILE) -> tuple[Vectors, ...]:
    """All vectors of a file, read-only.

    Raises:
        ValueError: the file has another version than this loader.
    """
    with np.load(path) as found:
        index = json.loads(found["index"].tobytes())
        if index["version"] != VERSION:
            raise ValueError(f"{path} has version {index['version']}, expected {VERSION}")
        arrays = {name: found[name] for name in found.files}
    for array in arrays.values():
        array.flags.writeable = False
    return tuple(_record(entry, arrays) for entry in index["vectors"])


def _record(entry: dict[str, Any], arrays: dict[str, Any]) -> Vectors:
    rows, stored, values = (arrays.get(entry.pop(part)) for part in PARTS)
    if rows is not None and rows.dtype == np.uint16:
        rows = rows.view(BFLOAT16)
    return Vectors(**entry, rows=rows, stored=stored, values=values)


def make() -> Iterator[Vectors]:
    """The vectors, from their rows and the exact formats."""
    for fmt in FORMATS.values():
        if not fmt.packed:
            yield from _written(fmt, vector_rows.plain_rows(fmt))
        elif fmt.tile_scales:
            for rule in fmt.tile_scales:
                yield from _written(fmt, vector_rows.ds_mla_rows(), tile_scale=rule)
            yield from _read_only(fmt, Widths(512, 64), Widths(128, 8), Widths(256, 0))
        elif fmt.needs_scale:
            for scale in vector_rows.K_SCALES:
                yield from _written(fmt, vector_rows.per_tensor_rows(fmt, scale), k_scale=scale)
                yield from _read_only(fmt, Widths(512, 64), k_scale=scale)
        else:
            yield from _written(fmt, vector_rows.per_token_rows(fmt))
            yield from _read_only(fmt, Widths(512, 64), Widths(40, 8), Widths(48, 0))


def _written(
    fmt: CacheFormat, named: Iterable[tuple[str, Widths, Any]], **scales: Any
) -> Iterator[Vectors]:
    for name, dims, rows in named:
        stored = fmt.encode(rows, dims, **scales).view(np.uint8)
        yield _vectors(fmt, name, dims, rows, stored, **scales)


def _read_only(fmt: CacheFormat, *widths: Widths, **scales: Any) -> Iterator[Vectors]:
    for dims in widths:
        stored = vector_rows.stored_rows(fmt, dims)
        yield _vectors(fmt, "all_codes", dims, None, stored, **scales)


def _vectors(
    fmt: CacheFormat,
    name: str,
    dims: Widths,
    rows: Any,
    stored: Any,
    k_scale: float | None = None,
    tile_scale: str | None = None,
) -> Vectors:
    values = fmt.decode(stored.view(fmt.storage), dims, k_scale=k_scale)
    return Vectors(fmt.name, name, dims.L, dims.R, k_scale, tile_scale, rows, stored, values)


def save(vectors: Iterable[Vectors], path: Path = FILE) -> None:
    """Write a file that `load` reads; an array that several vectors share is kept once."""
    arrays: dict[str, Any] = {}
    names: dict[tuple[Any, ...], str] = {}

    def keep(array: Any, name: str) -> str:
        if array is None:
            return ""
        plain = array.view(np.uint16) if array.dtype == BFLOAT16 else array
        name = names.setdefault((plain.dtype, plain.shape, plain.tobytes()), name)
        arrays[name] = plain
        return name

    entries = [
        {
            "cache_format": each.cache_format,
            "name": each.name,
            "L": each.L,
            "R": each.R,
            "k_scale": each.k_scale,
            "tile_scale": each.tile_scale,
            **{part: keep(getattr(each, part), f"{each.label}/{part}") for part in PARTS},
        }
        for each in vectors
    ]
    index = json.dumps({"version": VERSION, "vectors": entries})
    path.parent.mkdir(exist_ok=True)
    np.savez_compressed(path, index=np.frombuffer(index.encode(), np.uint8), **arrays)


if __name__ == "__main__":
    save(make())
