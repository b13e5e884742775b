"""The device and the CuPy stream that a call's work is queued on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from sandbox.arrays.adopted import import_cupy
from sandbox.arrays.kinds import Kind


def captures(stream: Any) -> bool:
    """Whether a CuPy stream is being captured in a CUDA graph; CUDA's default streams cannot be."""
    return stream.ptr > 2 and stream.is_capturing()


def capturing(kind: Kind) -> bool:
    """Whether the current stream of a kind's GPU is being captured in a CUDA graph; a CPU has none.

    Inside `borrow`, where the device is the current one.
    """
    return kind.gpu is not None and captures(import_cupy().cuda.get_current_stream())


def current_stream_pointer() -> int:
    """The `cudaStream_t` of CuPy's current stream, for libraries that launch on it too."""
    return import_cupy().cuda.get_current_stream().ptr


def wait(stream: Any, other: Any) -> None:
    """`stream` waits for what `other` has queued, unless a CUDA graph is captured on either."""
    if stream.ptr != other.ptr and not any(map(captures, (stream, other))):
        stream.wait_event(other.record())


@contextlib.contextmanager
def make_current(gpu: int, kinds: set[Kind]) -> Iterator[None]:
    """Makes `gpu`, and the stream of `kinds`, which live on it, current; restores both."""
    cuda = import_cupy().cuda
    device = cuda.runtime.getDevice()
    cuda.runtime.setDevice(gpu)
    try:
        outer = cuda.get_current_stream()
        stream = next((s for s in (kind.stream() for kind in kinds) if s is not None), outer)
        if len(kinds) > 1:
            wait(stream, outer)
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
