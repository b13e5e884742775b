"""Arguments of a call, taken in without a copy."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from sandbox.arrays.adopted import import_cupy
from sandbox.arrays.kinds import NUMPY, Kind, exporter, kind_finder, libraries_of, not_an_array
from sandbox.arrays.streams import make_current, wait


@functools.cache
def _passes_through(cls: type) -> bool:
    """Whether `borrow` leaves an instance of `cls` alone, as it makes no claim to be an array."""
    if issubclass(cls, np.generic | np.dtype | type):
        return True
    claims = ("shape", "__array__", "__array_interface__", "__cuda_array_interface__")
    return not issubclass(cls, list | tuple) and not any(hasattr(cls, c) for c in claims)


def adopt(value: Any, name: str = "array") -> Any:
    """`value` as a NumPy (CPU) or CuPy (GPU) array that shares its memory and keeps it alive.

    Shape and strides stay; bf16 comes as `bfloat16`, fp8 as ``uint8`` codes; a tensor that requires
    gradients is taken as detached. NumPy and CuPy arrays come back as they are. On a GPU, CuPy's
    current stream from here on follows what the other library has queued.

    Raises TypeError, with `name`, for lists and Python scalars, sparse tensors, lazily conjugated
    or negated ones, masked arrays, arrays spread over devices, dtypes that cannot be shared.
    """
    kind = exporter(value, name)
    array = kind.adopt(value, name)
    if kind.gpu is not None and (stream := kind.stream()) is not None:
        cuda = import_cupy().cuda
        with cuda.Device(kind.gpu):
            wait(cuda.get_current_stream(), stream)
    return array


class Borrowed:
    """The arguments of one call, adopted. See `borrow`.

    Attributes:
        arrays: argument name -> adopted array; values that are not arrays are as they were.
        kind: the caller's `Kind`.
        xp: ``numpy`` or ``cupy``.
    """

    __slots__ = ("_originals", "arrays", "kind", "xp")

    def __init__(self, originals: Mapping[str, Any], kinds: dict[str, Kind], kind: Kind) -> None:
        self.arrays = dict(originals)
        for name, own in kinds.items():
            if own is not NUMPY:
                self.arrays[name] = own.adopt(originals[name], name)
        self.kind = kind
        self.xp = kind.xp
        self._originals = originals

    def original(self, name: str) -> Any:
        """The object that the caller passed as `name`."""
        return self._originals[name]

    def returned(self, name: str, adopted: Any, result: Any) -> Any:
        """What the caller gets for the output `name`, once its writes are queued.

        `result` is the object that was passed, or with `adopted` a pair from ``kind.empty``.
        """
        passed = self._originals[name] is not None
        return result if passed else self.kind.finish(adopted, result)

    def require_writeable(self, *names: str) -> None:
        """`require_writeable` for each of the named arguments, as passed and as adopted."""
        for name in names:
            require_writeable(self._originals[name], name)
            require_writeable(self.arrays[name], name)


@contextlib.contextmanager
def borrow(arguments: Mapping[str, Any]) -> Iterator[Borrowed]:
    """Adopts the arguments of a call and makes the caller's device and stream current.

    The kind of the first array decides the kind of the results. The stream is torch's current
    stream on that device if any argument is a torch tensor, else CuPy's; afterwards device and
    stream are as they were. None, numbers, strings and other objects that are not arrays pass
    through. A 0-d array on the CPU counts as a number, so it may go along with arrays on a GPU.

    Raises TypeError as `adopt` does, and ValueError if arrays live on different devices.
    """
    kinds: dict[str, Kind] = {}
    for name, value in arguments.items():
        find = kind_finder(type(value))
        if find is not None:
            kinds[name] = find(value, name)
        elif not _passes_through(type(value)):
            raise not_an_array(value, name)
    kind = _common_kind(kinds, arguments)
    if kind.gpu is None:
        yield Borrowed(arguments, kinds, kind)
    else:
        with make_current(kind.gpu, {k for k in kinds.values() if k.gpu == kind.gpu}):
            yield Borrowed(arguments, kinds, kind)


def _common_kind(kinds: dict[str, Kind], arguments: Mapping[str, Any]) -> Kind:
    if len({kind.gpu for kind in kinds.values()}) > 1:
        kinds = {
            name: kind
            for name, kind in kinds.items()
            if kind.gpu is not None or getattr(arguments[name], "ndim", 1) > 0
        }
    (first, kind), *rest = kinds.items() or [("", NUMPY)]
    for name, other in rest:
        if other.gpu != kind.gpu:
            raise ValueError(
                f"mixed devices: {first} is on {kind.device}, {name} is on {other.device}"
            )
    return kind


def require_writeable(array: Any, name: str) -> None:
    """Raises ValueError if `array`, adopted or as passed, cannot be an output.

    That is a read-only NumPy array, a JAX array, or one whose elements share memory (stride 0).
    """
    if "jax" in libraries_of(type(array)):
        raise ValueError(f"{name}: a JAX array cannot change, so it cannot be an output")
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        raise ValueError(f"{name}: the array is read-only, so it cannot be an output")
    strides = getattr(array, "strides", None) or ()
    repeated = any(n > 1 and step == 0 for n, step in zip(array.shape, strides, strict=False))
    if repeated and 0 not in array.shape:
        raise ValueError(f"{name}: elements share memory (strides {strides}), so it is no output")
