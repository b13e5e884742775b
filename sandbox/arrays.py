"""Arrays in and out of the ops, without a copy.

Ops work on NumPy arrays (CPU) or CuPy arrays (GPU). A caller may hand in either, or torch tensors
(``nn.Parameter`` too), JAX arrays, or any object that speaks DLPack: `adopt` takes one in, `borrow`
all the arguments of a call, and a `Kind` allocates and returns results as the caller's own library
would. Memory is shared in both directions, and each array keeps the memory under it alive.

Conventions: bf16 is ``ml_dtypes.bfloat16`` in NumPy and CuPy. fp8 and other packed formats are
``uint8`` codes. Where a library cannot carry them, their bits are reinterpreted (``int16`` and
``uint8`` views), never converted.

This module imports neither torch nor CuPy nor JAX until one of their arrays comes in.
"""

from __future__ import annotations

import contextlib
import functools
import numbers
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

bfloat16 = np.dtype(ml_dtypes.bfloat16)

DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": bfloat16,
    "uint8": np.dtype(np.uint8),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
}

_DLPACK_CPU = (1, 3)  # kDLCPU, kDLCUDAHost
_DLPACK_CUDA = (2, 13)  # kDLCUDA, kDLCUDAManaged
REFUSALS = (TypeError, ValueError, RuntimeError, BufferError, AttributeError)


def import_cupy() -> ModuleType:
    try:
        import cupy
    except ImportError as error:
        raise ImportError(f"arrays on a GPU need CuPy, which does not import: {error}") from error
    return cupy


def _type_name(value: Any) -> str:
    cls = type(value)
    return f"{cls.__module__}.{cls.__qualname__}".removeprefix("builtins.")


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
            raise TypeError(f"{name}: {_type_name(value)} has no single device: {error}") from error
        if device in _DLPACK_CPU:
            return cls.on(None)
        if device in _DLPACK_CUDA:
            return cls.on(int(index))
        raise TypeError(
            f"{name}: {_type_name(value)} is on DLPack device type {int(device)}; "
            "only CPU (1, 3) and CUDA (2, 13) are supported"
        )

    def adopt(self, value: Any, name: str) -> Any:
        try:
            return self.xp.from_dlpack(value)
        except REFUSALS as error:
            raise refusal(value, name, error) from error


def refusal(value: Any, name: str, reason: Exception) -> TypeError:
    """What to raise when a library gives `reason` not to share the memory of `value`."""
    return TypeError(f"{name}: {_type_name(value)} cannot be shared without a copy: {reason}")


@functools.cache
def _libraries(cls: type) -> set[str]:
    """The libraries that `cls` and its bases come from; "jax" also for jaxlib."""
    return {base.__module__.partition(".")[0].removesuffix("lib") for base in cls.__mro__}


@functools.cache
def _finder(cls: type) -> Callable[[Any, str], Kind] | None:
    """How to find the kind of an instance of `cls`; None where `cls` is not an array type."""
    if issubclass(cls, np.ma.MaskedArray) or not hasattr(cls, "__dlpack__"):
        return None
    if issubclass(cls, np.ndarray):
        return lambda value, name: _NUMPY
    libraries = _libraries(cls)
    if "cupy" in libraries:
        return lambda value, name: Kind.on(value.data.device_id)
    if "torch" in libraries:
        from sandbox.torch_arrays import TorchKind

        return TorchKind.of
    if "jax" in libraries:
        from sandbox.jax_arrays import JaxKind

        return JaxKind.of
    return DLPackKind.of


_NUMPY = Kind.on(None)


@functools.cache
def _passes_through(cls: type) -> bool:
    """Whether `borrow` leaves an instance of `cls` alone, as it makes no claim to be an array."""
    if issubclass(cls, np.generic | np.dtype | type):
        return True
    claims = ("shape", "__array__", "__array_interface__", "__cuda_array_interface__")
    return not issubclass(cls, list | tuple) and not any(hasattr(cls, c) for c in claims)


def _not_an_array(value: Any, name: str) -> TypeError:
    return TypeError(
        f"{name}: expected an array (NumPy, CuPy, torch, JAX or another that speaks DLPack), "
        f"got {_type_name(value)}"
    )


def exporter(value: Any, name: str = "array") -> Kind:
    """The kind of `value`, so that results can be given back in it.

    An array of a library that is not known here by name has the kind NumPy or CuPy's, by its
    device. Raises TypeError, with `name`, for what is not an array on the CPU or one CUDA device.
    """
    find = _finder(type(value))
    if find is None:
        raise _not_an_array(value, name)
    return find(value, name)


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
            _wait(cuda.get_current_stream(), stream)
    return array


def _wait(stream: Any, other: Any) -> None:
    """`stream` waits for what `other` has queued, unless a CUDA graph is captured on either."""
    capturing = any(map(_captures, (stream, other)))
    if stream.ptr != other.ptr and not capturing:
        stream.wait_event(other.record())


@contextlib.contextmanager
def _current(gpu: int, kinds: set[Kind]) -> Iterator[None]:
    """Makes `gpu`, and the stream of `kinds`, which live on it, current; restores both."""
    cuda = import_cupy().cuda
    device = cuda.runtime.getDevice()
    cuda.runtime.setDevice(gpu)
    try:
        outer = cuda.get_current_stream()
        stream = next((s for s in (kind.stream() for kind in kinds) if s is not None), outer)
        if len(kinds) > 1:
            _wait(stream, outer)
        stream.use()
        try:
            yield
            if any(kind.waits_on_exit for kind in kinds):
                stream.synchronize()
        finally:
            cuda.runtime.setDevice(gpu)
            outer.use()
    finally:
        cuda.runtime.setDevice(device)


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
            if own is not _NUMPY:
                self.arrays[name] = own.adopt(originals[name], name)
        self.kind = kind
        self.xp = kind.xp
        self._originals = originals

    def original(self, name: str) -> Any:
        """The object that the caller passed as `name`."""
        return self._originals[name]

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
        find = _finder(type(value))
        if find is not None:
            kinds[name] = find(value, name)
        elif not _passes_through(type(value)):
            raise _not_an_array(value, name)
    kind = _common_kind(kinds, arguments)
    if kind.gpu is None:
        yield Borrowed(arguments, kinds, kind)
    else:
        with _current(kind.gpu, {k for k in kinds.values() if k.gpu == kind.gpu}):
            yield Borrowed(arguments, kinds, kind)


def _common_kind(kinds: dict[str, Kind], arguments: Mapping[str, Any]) -> Kind:
    if len({kind.gpu for kind in kinds.values()}) > 1:
        kinds = {
            name: kind
            for name, kind in kinds.items()
            if kind.gpu is not None or getattr(arguments[name], "ndim", 1) > 0
        }
    (first, kind), *rest = kinds.items() or [("", _NUMPY)]
    for name, other in rest:
        if other.gpu != kind.gpu:
            raise ValueError(
                f"mixed devices: {first} is on {kind.device}, {name} is on {other.device}"
            )
    return kind


def namespace(*arrays: Any) -> ModuleType:
    """``numpy`` or ``cupy``: the namespace of adopted arrays.

    Raises TypeError if there is none, if they mix the two, or if one is not adopted yet.
    """
    cupy = sys.modules.get("cupy")
    found: dict[ModuleType, int] = {}
    for position, array in enumerate(arrays):
        if isinstance(array, np.ndarray):
            found.setdefault(np, position)
        elif cupy is not None and isinstance(array, cupy.ndarray):
            found.setdefault(cupy, position)
        else:
            raise TypeError(
                f"array {position} is {_type_name(array)}, expected an adopted NumPy or CuPy array"
            )
    if len(found) != 1:
        mix = " and ".join(f"{xp.__name__} (array {position})" for xp, position in found.items())
        raise TypeError(f"mixed namespaces: {mix}" if mix else "expected at least one array")
    return next(iter(found))


def is_gpu(array: Any) -> bool:
    """Whether an adopted array lives on a GPU."""
    return namespace(array) is not np


def require_writeable(array: Any, name: str) -> None:
    """Raises ValueError if `array`, adopted or as passed, cannot be an output.

    That is a read-only NumPy array, a JAX array, or one whose elements share memory (stride 0).
    """
    if "jax" in _libraries(type(array)):
        raise ValueError(f"{name}: a JAX array cannot change, so it cannot be an output")
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        raise ValueError(f"{name}: the array is read-only, so it cannot be an output")
    strides = getattr(array, "strides", None) or ()
    repeated = any(n > 1 and step == 0 for n, step in zip(array.shape, strides, strict=False))
    if repeated and 0 not in array.shape:
        raise ValueError(f"{name}: elements share memory (strides {strides}), so it is no output")


def to_torch(array: Any) -> Any:
    """An adopted array (bf16 included) as a torch tensor over the same memory, on its device.

    Raises ValueError for negative strides, which torch cannot hold.
    """
    from sandbox.torch_arrays import TorchKind

    return TorchKind.on(array.data.device_id if is_gpu(array) else None).export(array)


def is_array(value: Any) -> bool:
    """Whether `value` is an adopted array; NumPy's scalars, which look like arrays, are not."""
    cupy = sys.modules.get("cupy")
    return isinstance(value, np.ndarray) or (cupy is not None and isinstance(value, cupy.ndarray))


def address(array: Any) -> int:
    """Address of the first element of an adopted array."""
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


def _captures(stream: Any) -> bool:
    """Whether a CuPy stream is being captured in a CUDA graph; CUDA's default streams cannot be."""
    return stream.ptr > 2 and stream.is_capturing()


def capturing() -> bool:
    """Whether CuPy's current stream is being captured in a CUDA graph."""
    return _captures(import_cupy().cuda.get_current_stream())


def current_stream_pointer() -> int:
    """The `cudaStream_t` of CuPy's current stream, for libraries that launch on it too."""
    return import_cupy().cuda.get_current_stream().ptr


def torch_has_cuda() -> bool:
    """Whether the installed torch can use a GPU here."""
    import torch

    return torch.cuda.is_available()


def torch_on_current_stream() -> contextlib.AbstractContextManager[Any]:
    """Makes CuPy's current stream torch's current one as well."""
    import torch

    device = import_cupy().cuda.runtime.getDevice()
    pointer = current_stream_pointer()
    if not pointer:  # ExternalStream(0) would be a new stream, not the default one
        return torch.cuda.stream(torch.cuda.default_stream(device))
    return torch.cuda.stream(torch.cuda.ExternalStream(pointer, device=device))


def device_scalar(value: Any, xp: ModuleType, dtype: Any = np.float32, name: str = "scale") -> Any:
    """A number as a contiguous array of shape ``(1,)`` in `xp`, where a kernel can read it.

    `value` is a Python or NumPy number, or an array of any kind with one element. It is not copied
    if it already is an array of that dtype on that device. A number for a GPU is uploaded once for
    each value and kept, as a captured graph may hold its address: use it once before the capture.

    Raises TypeError for what is not a real number, ValueError if an array has not exactly one
    element, lives on another device, or `dtype` cannot hold the value.
    """
    dtype = np.dtype(dtype)
    if _finder(type(value)) is not None:
        array = adopt(value, name)
        if array.size != 1:
            raise ValueError(f"{name}: expected one element, got shape {array.shape}")
        if array.dtype.kind in "ub":  # codes of an 8-bit float, too, arrive as uint8
            raise TypeError(f"{name}: expected a number of 16 bits or more, got {array.dtype}")
        if is_gpu(array):
            gpu = array.data.device_id
            if xp is np or gpu != xp.cuda.runtime.getDevice():
                raise ValueError(f"mixed devices: {name} is on cuda:{gpu}, the call is not")
            return array.reshape(1).astype(dtype, copy=False)
        if xp is np and array.dtype == dtype:
            return array.reshape(1)
        value = array.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real | ml_dtypes.bfloat16):
        raise TypeError(f"{name}: expected a number or an array of one, got {_type_name(value)}")
    try:
        with np.errstate(over="raise"):
            number = np.array([value], dtype)
    except (OverflowError, FloatingPointError):
        raise ValueError(f"{name}: {value} is too large for {dtype}") from None
    return number if xp is np else _uploaded(number.tobytes(), dtype, xp.cuda.runtime.getDevice())


@functools.cache
def _uploaded(bits: bytes, dtype: np.dtype, gpu: int) -> Any:
    cupy = import_cupy()
    array = cupy.asarray(np.frombuffer(bits, dtype))
    cupy.cuda.get_current_stream().synchronize()
    return array
