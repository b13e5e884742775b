"""Where weights come from: a module, a mapping of arrays, or safetensors files.

A source knows the names that it has and opens `StoredTensor`s, which are read a slice at a time:
arrays in memory as views, files as just the bytes of the slice. Files need no torch.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from safetensors import SafetensorError, safe_open

from sandbox import arrays

INDEX = "model.safetensors.index.json"
FILES = "*.safetensors"
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "U8": "uint8",
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that is not read yet.

    Attributes:
        name: in its source, with any prefix.
        dtype: its name; what is of an 8-bit float reads as its uint8 codes.
        shape: of the whole tensor.
        read: takes a slice for each axis and returns that part as a NumPy or CuPy array.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[tuple[slice, ...]], Any]


class Source(Protocol):
    names: Collection[str]

    def opened(self, names: Iterable[str]) -> AbstractContextManager[dict[str, StoredTensor]]:
        """The named tensors, which can be read inside the context."""
        ...


def open_source(source: Any) -> Source:
    """The source that a caller means by `source`; see `MLAWeights.load`.

    Raises TypeError for what is none, FileNotFoundError and ValueError for paths and files.
    """
    if isinstance(source, str | os.PathLike):
        return Files(Path(source))
    if not isinstance(source, Mapping) and callable(getattr(source, "state_dict", None)):
        source = source.state_dict()
    if not isinstance(source, Mapping):
        raise TypeError(
            f"source is {type(source).__name__}, expected a module with a state_dict, a mapping "
            "of names to arrays, or a path to safetensors files"
        )
    return Memory(source)


class Memory:
    """Arrays of any library that `sandbox.arrays` takes in."""

    def __init__(self, mapping: Mapping[str, Any]) -> None:
        self.names = mapping.keys()
        self._mapping = mapping

    @contextlib.contextmanager
    def opened(self, names: Iterable[str]) -> Iterator[dict[str, StoredTensor]]:
        """Raises TypeError for what is no array that can be shared, ValueError for two devices."""
        with arrays.borrow({name: self._mapping[name] for name in names}) as borrowed:
            yield {name: _in_memory(borrowed, name) for name in borrowed.arrays}


def _in_memory(borrowed: arrays.Borrowed, name: str) -> StoredTensor:
    array = arrays.adopt(borrowed.arrays[name], name)  # an error for None and numbers
    dtype = str(getattr(borrowed.original(name), "dtype", array.dtype)).removeprefix("torch.")
    if not dtype.startswith("float8"):
        return StoredTensor(name, str(array.dtype), tuple(array.shape), array.__getitem__)
    return StoredTensor(name, dtype, tuple(array.shape), array.view(np.uint8).__getitem__)


class Files:
    """A safetensors file, a folder of them, or the index of sharded ones.

    Nothing is opened but headers, and of an index's files only those with a wanted tensor.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            raise FileNotFoundError(f"source is {str(path)!r}, which does not exist")
        if path.is_dir():
            index = path / INDEX
            homes = _from_index(index) if index.exists() else _from_headers(path.glob(FILES))
        elif path.suffix == ".json":
            homes = _from_index(path)
        elif path.suffix == ".safetensors":
            homes = _from_headers([path])
        else:
            raise ValueError(
                f"source is {str(path)!r}, expected a .safetensors file, a folder of them or an "
                f"index such as {INDEX}"
            )
        if not homes:
            raise ValueError(f"source is {str(path)!r}, which has no tensors")
        self.names = homes.keys()
        self._homes = homes

    @contextlib.contextmanager
    def opened(self, names: Iterable[str]) -> Iterator[dict[str, StoredTensor]]:
        """Raises FileNotFoundError for a file that an index names and that is not there, ValueError
        for one that is no safetensors file or has not the tensor that it should."""
        homes = {name: self._homes[name] for name in names}
        opened = functools.cache(_open)
        yield {name: _in_file(opened(path), path, name) for name, path in homes.items()}


def _open(path: Path) -> Any:
    # NumPy's bfloat16, which `sandbox.arrays` has imported, is what lets "numpy" read bf16.
    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise ValueError(f"{str(path)!r} is no safetensors file: {error}") from error


def _from_index(path: Path) -> dict[str, Path]:
    try:
        files = json.loads(path.read_text())["weight_map"]
        return {name: path.parent / file for name, file in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{str(path)!r} is no index: it has no weight_map") from error


def _from_headers(paths: Iterable[Path]) -> dict[str, Path]:
    homes: dict[str, Path] = {}
    for path in sorted(paths):
        names = _open(path).keys()
        for name in names:
            if name in homes:
                raise ValueError(
                    f"{name} is both in {str(homes[name])!r} and in {path.name!r}: which is meant, "
                    f"an {INDEX} would say"
                )
            homes[name] = path
    return homes


def _in_file(opened: Any, path: Path, name: str) -> StoredTensor:
    try:
        stored = opened.get_slice(name)
    except SafetensorError as error:
        raise ValueError(f"{name} is not in {str(path)!r}: {error}") from error
    dtype, shape = stored.get_dtype(), tuple(stored.get_shape())
    read = stored.__getitem__
    if dtype.startswith("F8"):
        read = functools.partial(_read_codes, path, name)
    return StoredTensor(name, _DTYPES.get(dtype, dtype), shape, read)


def _read_codes(path: Path, name: str, part: tuple[slice, ...]) -> np.ndarray:
    """The codes of an 8-bit float, which the library does not give to NumPy.

    They lie where the header, JSON after its own length in 8 bytes, says.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(length))[name]
    offset = 8 + length + entry["data_offsets"][0]
    return np.memmap(path, np.uint8, "r", offset, tuple(entry["shape"]))[part]
