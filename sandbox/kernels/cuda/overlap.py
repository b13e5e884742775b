"""Launches that may overlap with the end of the kernel before them.

CuPy's launcher cannot ask for it (programmatic dependent launch), so this one calls the driver.
"""

import ctypes
import threading
from collections.abc import Sequence
from functools import cache

PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_..., of cuda.h


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id, padding, and a union of 64 bytes."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_char * 4),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


@cache
def _driver() -> ctypes.PyDLL:
    return ctypes.PyDLL("libcuda.so.1")  # to release the GIL would cost more than the call


class OverlappingFunction:
    """A loaded kernel, by its CUfunction, whose blocks may start before the work ahead is done."""

    def __init__(self, entry: str, function: int, parameter_sizes: Sequence[int]):
        self._entry = entry
        self._function = ctypes.c_void_p(function)
        slots = [-(-size // 16) * 16 for size in parameter_sizes]
        self._buffer = (ctypes.c_char * (sum(slots) + 16))()
        start = ctypes.addressof(self._buffer)
        start += -start % 16
        self._places = [start + sum(slots[:i]) for i in range(len(slots))]
        self._pointers = (ctypes.c_void_p * len(slots))(*self._places)
        self._attribute = _Attribute(id=PROGRAMMATIC_STREAM_SERIALIZATION, value=1)
        self._config = _Config(attributes=ctypes.pointer(self._attribute), attribute_count=1)
        self._filling = threading.Lock()  # of the buffers above, until they are read

    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        values: Sequence[object],
        shared_bytes: int,
        stream: int,
    ) -> None:
        """Queue it on `stream`, a cudaStream_t; `values` are CuPy arrays and NumPy scalars."""
        with self._filling:
            for place, value in zip(self._places, values):
                data = getattr(value, "data", None)
                pointer = getattr(data, "ptr", None)
                if pointer is not None:
                    ctypes.c_uint64.from_address(place).value = pointer
                else:
                    raw = value.tobytes()
                    ctypes.memmove(place, raw, len(raw))
            config = self._config
            config.grid[:], config.block[:] = grid, block
            config.shared_bytes, config.stream = shared_bytes, stream
            status = _driver().cuLaunchKernelEx(
                ctypes.byref(config), self._function, self._pointers, None
            )
        if status:
            raise RuntimeError(f"{self._entry}: cuLaunchKernelEx failed: {_error_name(status)}")


def _error_name(status: int) -> str:
    name = ctypes.c_char_p()
    _driver().cuGetErrorName(status, ctypes.byref(name))
    return name.value.decode() if name.value else f"error {status}"
