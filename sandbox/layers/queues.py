"""In which order work is done: at once by NumPy, as its current stream has it by CuPy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from sandbox import arrays


class Immediate:
    """NumPy's order of work: what was called is done."""

    def copy(self, source: Any, out: Any) -> None:
        out[...] = source

    def mark(self) -> None:
        return None

    def wait(self, mark: None) -> None:
        pass


class CurrentStream:
    """CuPy's order of work: that of its current stream, in which waits for other streams stand."""

    def __init__(self) -> None:
        self.cuda = arrays.import_cupy().cuda
        self.stream = self.cuda.get_current_stream()

    def copy(self, source: Any, out: Any) -> None:
        """Bytes, from any device."""
        out.data.copy_from_device_async(source.data, source.nbytes, self.stream)

    def mark(self) -> Any:
        """What another stream waits for to come after all that is queued here."""
        return self.stream.record(self.cuda.Event(disable_timing=True))

    def wait(self, mark: Any) -> None:
        self.stream.wait_event(mark)


def queue_of(array: Any) -> Immediate | CurrentStream:
    if not arrays.is_gpu(array):
        return Immediate()
    require_current_device(array)
    return CurrentStream()


def require_current_device(array: Any) -> None:
    """Raises ValueError if a CuPy array lives on another device than the current one."""
    device, current = array.data.device_id, arrays.import_cupy().cuda.runtime.getDevice()
    if device != current:
        raise ValueError(f"array is on cuda:{device}, expected the current device, cuda:{current}")


def place_of_caller() -> Callable[[], None]:
    """A function that makes the GPU and the CuPy stream of this thread current in another."""
    cupy = sys.modules.get("cupy")
    if cupy is None or not cupy.cuda.is_available():
        return lambda: None
    device, stream = cupy.cuda.runtime.getDevice(), cupy.cuda.get_current_stream()

    def begin() -> None:
        cupy.cuda.runtime.setDevice(device)
        stream.use()

    return begin
