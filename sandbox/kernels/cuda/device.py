"""The GPU as the runtime describes it, or why there is none."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class DeviceInfo:
    """One GPU. Sizes in bytes; `shared_per_block` is the most a kernel may opt in to."""

    index: int
    name: str
    cc: tuple[int, int]
    sms: int
    shared_per_block: int
    shared_per_sm: int
    registers_per_sm: int
    threads_per_sm: int
    l2_bytes: int
    memory_bytes: int


def device_info(index: int | None = None) -> DeviceInfo | None:
    """GPU `index`, by default CuPy's current one; None where `no_device_reason` has a reason."""
    if no_device_reason() is not None:
        return None
    from cupy.cuda import runtime

    return _describe(runtime.getDevice() if index is None else index)


@cache
def no_device_reason() -> str | None:
    """Why no GPU can be used, in words; None when one can."""
    try:
        from cupy.cuda import runtime
    except ImportError as error:
        return f"CuPy cannot be imported ({error}): pip install cupy-cuda12x or cupy-cuda13x"
    try:
        return None if runtime.getDeviceCount() else "no GPU is visible"
    except Exception as error:  # also without libcudart, with other exception types
        return f"no usable GPU ({error})"


@cache
def _describe(index: int) -> DeviceInfo:
    from cupy.cuda import runtime

    found = runtime.getDeviceProperties(index)
    return DeviceInfo(
        index=index,
        name=found["name"].decode(),
        cc=(found["major"], found["minor"]),
        sms=found["multiProcessorCount"],
        shared_per_block=found["sharedMemPerBlockOptin"],
        shared_per_sm=found["sharedMemPerMultiprocessor"],
        registers_per_sm=found["regsPerMultiprocessor"],
        threads_per_sm=found["maxThreadsPerMultiProcessor"],
        l2_bytes=found["l2CacheSize"],
        memory_bytes=found["totalGlobalMem"],
    )


_KIB = 1024
SHARED_PER_BLOCK = {
    "sm_75": 64 * _KIB,
    "sm_80": 163 * _KIB,
    "sm_86": 99 * _KIB,
    "sm_89": 99 * _KIB,
    "sm_90": 227 * _KIB,
    "sm_90a": 227 * _KIB,
    "sm_100": 227 * _KIB,
    "sm_120": 99 * _KIB,
}
"""Bytes of shared memory that a kernel may opt in to, by architecture."""

_PLANNED_FOR: ContextVar[str] = ContextVar("planned_for", default="sm_90")


@contextmanager
def planned_for(arch: str) -> Iterator[None]:
    """Inside it launches on arrays in CPU memory are made as for a GPU of `arch`, else of sm_90."""
    token = _PLANNED_FOR.set(arch)
    try:
        yield
    finally:
        _PLANNED_FOR.reset(token)


def shared_per_block(on_gpu: bool) -> int:
    """Shared memory that a block may have: on the current GPU, or on the one planned for."""
    return device_info().shared_per_block if on_gpu else SHARED_PER_BLOCK[_PLANNED_FOR.get()]
