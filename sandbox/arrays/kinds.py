"""The caller's kinds of array: how to find one, and results in it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from sandbox.arrays.adopted import import_cupy, is_gpu, type_name

_DLPACK_CPU = (1, 3)  # kDLCPU, kDLCUDAHost
_DLPACK_CUDA = (2, 13)  # kDLCUDA, kDLCUDAManaged
REFUSALS = (TypeError, ValueError, RuntimeError, BufferError, AttributeError)

_KINDS: dict[tuple[type, int | None], Kind] = {}


class Kind:
    """The caller's kind of array: a library and a device. `exporter` finds the kind of a value.

    There is one `Kind` object for each library and device, so kinds compare with ``is``. This class
    itself stands for NumPy (`gpu` is None) and CuPy (`gpu` is the device's index).
    """

    waits_on_exit = False  # whether `borrow` has to wait until the GPU has finished the call

    def __init__(self, gpu: int | None) -> None:
        self.gpu = gpu

    @classmethod
    def on(cls, gpu: int | None) -> Kind:
        found = _KINDS.get((cls, gpu))
        return _KINDS.setdefault((cls, gpu), cls(gpu)) if found is None else found

    @property
    def library(self) -> str:
        return "NumPy" if self.gpu is None else "CuPy"

    @property
    def device(self) -> str:
        """``"cpu"`` or ``"cuda:<index>"``."""
        return "cpu" if self.gpu is None else f"cuda:{self.gpu}"

    @property
    def xp(self) -> ModuleType:
        """The namespace of the adopted arrays: ``numpy`` or ``cupy``."""
        return np if self.gpu is None else import_cupy()

    def __repr__(self) -> str:
        return f"{self.library} on {self.device}"

    def stream(self) -> Any:
        """The stream that this library makes current, as a CuPy stream; None if CuPy's own is."""
        return None

    def adopt(self, value: Any, name: str) -> Any:
        """`value`, an array of this kind, as a NumPy or CuPy array that shares its memory."""
        return value

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> tuple[Any, Any]:
        """Uninitialised memory from the caller's own allocator.

        Returns ``(adopted, result)``: the NumPy or CuPy array to write into, and the caller's
        object over the same memory. Call it inside `borrow`, where the device and the stream are
        right. Once its work is queued, an op returns ``kind.finish(adopted, result)``.
        """
        buffer = self.xp.empty(shape, dtype)
        return buffer, buffer

    def export(self, array: Any) -> Any:
        """`array`, NumPy or CuPy on this kind's device, as the caller's kind over that memory."""
        return array

    def finish(self, adopted: Any, result: Any) -> Any:
        """What an op returns for a pair from `empty`, once it has queued the writes.

        It is `result`, except for JAX, whose arrays cannot change: a JAX array comes to be only
        here, over the memory of `adopted`.
        """
        return result


class DLPackKind(Kind):
    """Any other DLPack producer. Its results are NumPy or CuPy arrays, which speak DLPack too."""

    @classmethod
    def of(cls, value: Any, name: str) -> Kind:
        try:
            device, index = value.__dlpack_device__()
        except REFUSALS as error:
            raise TypeError(f"{name}: {type_name(value)} has no single device: {error}") from error
        if device in _DLPACK_CPU:
            return cls.on(None)
        if device in _DLPACK_CUDA:
            return cls.on(int(index))
        raise TypeError(
            f"{name}: {type_name(value)} is on DLPack device type {int(device)}; "
            "only CPU (1, 3) and CUDA (2, 13) are supported"
        )

    def adopt(self, value: Any, name: str) -> Any:
        try:
            return self.xp.from_dlpack(value)
        except REFUSALS as error:
            raise refusal(value, name, error) from error


def refusal(value: Any, name: str, reason: Exception) -> TypeError:
    """What to raise when a library gives `reason` not to share the memory of `value`."""
    return TypeError(f"{name}: {type_name(value)} cannot be shared without a copy: {reason}")


@functools.cache
def libraries_of(cls: type) -> set[str]:
    """The libraries that `cls` and its bases come from; "jax" also for jaxlib."""
    return {base.__module__.partition(".")[0].removesuffix("lib") for base in cls.__mro__}


@functools.cache
def kind_finder(cls: type) -> Callable[[Any, str], Kind] | None:
    """How to find the kind of an instance of `cls`; None where `cls` is not an array type."""
    if issubclass(cls, np.ma.MaskedArray) or not hasattr(cls, "__dlpack__"):
        return None
    if issubclass(cls, np.ndarray):
        return lambda value, name: NUMPY
    libraries = libraries_of(cls)
    if "cupy" in libraries:
        return lambda value, name: Kind.on(value.data.device_id)
    if "torch" in libraries:
        from sandbox.arrays.torch_kind import TorchKind

        return TorchKind.of
    if "jax" in libraries:
        from sandbox.arrays.jax_kind import JaxKind

        return JaxKind.of
    return DLPackKind.of


NUMPY = Kind.on(None)


def not_an_array(value: Any, name: str) -> TypeError:
    return TypeError(
        f"{name}: expected an array (NumPy, CuPy, torch, JAX or another that speaks DLPack), "
        f"got {type_name(value)}"
    )


def exporter(value: Any, name: str = "array") -> Kind:
    """The kind of `value`, so that results can be given back in it.

    An array of a library that is not known here by name has the kind NumPy or CuPy's, by its
    device. Raises TypeError, with `name`, for what is not an array on the CPU or one CUDA device.
    """
    find = kind_finder(type(value))
    if find is None:
        raise not_an_array(value, name)
    return find(value, name)


def to_torch(array: Any) -> Any:
    """An adopted array (bf16 included) as a torch tensor over the same memory, on its device.

    Raises ValueError for negative strides, which torch cannot hold.
    """
    from sandbox.arrays.torch_kind import TorchKind

    return TorchKind.on(array.data.device_id if is_gpu(array) else None).export(array)
