"""cuBLAS products on CuPy's current stream, in a captured graph too, where CuPy's own refuse.

Each thread, device and stream has a handle with a workspace of its own, so that products on two
streams never share one.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any

from sandbox import arrays
from sandbox.kernels.scratch import scratch
from sandbox.kernels.strides import element_strides

# Of NVIDIA's cublas_api.h and library_types.h.
_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}
_COMPUTE_32F, _DEFAULT_ALGORITHM = 68, -1
_NO_REDUCED_PRECISION_SUMS = 16
_WORKSPACE_BYTES = 32 << 20  # what NVIDIA recommends for Hopper

# By thread, device and stream; numbers of threads that ended are given to later ones.
_handles: dict[tuple[int, int, int], ctypes.c_void_p] = {}


@functools.cache
def _library() -> ctypes.CDLL:
    from cuda.pathfinder import load_nvidia_dynamic_lib

    return ctypes.CDLL(load_nvidia_dynamic_lib("cublas").abs_path)


def version() -> str:
    """Of the library that is found.

    Raises:
        Exception: it is not found, or is none; the message says where it was looked for.
    """
    parts = [ctypes.c_int() for _ in range(3)]
    for which, part in enumerate(parts):
        _call("cublasGetProperty", which, ctypes.byref(part))
    return ".".join(str(part.value) for part in parts)


def _call(name: str, *arguments: Any) -> None:
    if status := getattr(_library(), name)(*arguments):
        raise RuntimeError(f"{name} failed with cuBLAS status {status}")


def _handle(like: Any) -> ctypes.c_void_p:
    """The handle of the current thread, device and stream, made on first use."""
    stream = arrays.current_stream_pointer()
    key = (threading.get_ident(), like.data.device_id, stream)
    if key not in _handles:
        handle = ctypes.c_void_p()
        _call("cublasCreate_v2", ctypes.byref(handle))
        _call("cublasSetStream_v2", handle, ctypes.c_void_p(stream))
        workspace = scratch(like, "cublas", (_WORKSPACE_BYTES,), "uint8")
        pointer, size = ctypes.c_void_p(workspace.data.ptr), ctypes.c_size_t(_WORKSPACE_BYTES)
        _call("cublasSetWorkspace_v2", handle, pointer, size)
        _call("cublasSetMathMode", handle, _NO_REDUCED_PRECISION_SUMS)
        _handles[key] = handle
    return _handles[key]


def _layout(array: Any) -> tuple[int, bool]:
    """Elements from row to row, and whether it is columns that follow each other so."""
    rows, columns = array.shape[-2:]
    step, inner = element_strides(array)[-2:]
    if inner == 1 or columns == 1:
        return (max(step, columns) if rows > 1 else columns), False
    return (max(inner, rows) if columns > 1 else rows), True


def product(a: Any, b: Any, out: Any, accumulate: bool) -> None:
    """`out = a @ b`, or `out += a @ b`, of CuPy arrays as `products.matmul` has them.

    Raises:
        RuntimeError: cuBLAS refuses, with its status.
    """
    # cuBLAS stores columns first, and sees `out.T = b.T @ a.T`.
    operands, flips = [], []
    for array in (b, a, out):
        step, flipped = _layout(array)
        flips.append(int(flipped))
        kind = ctypes.c_int(_TYPES[array.dtype.name])
        operand: list[Any] = [ctypes.c_void_p(array.data.ptr), kind, ctypes.c_int(step)]
        if out.ndim == 3:
            operand.append(ctypes.c_longlong(element_strides(array)[0]))
        operands.append(operand)
    rows, columns = out.shape[-2:]
    sizes = map(ctypes.c_int, (columns, rows, a.shape[-1]))
    alpha, beta = ctypes.c_float(1), ctypes.c_float(accumulate)
    batch = [ctypes.c_int(len(out))] if out.ndim == 3 else []
    _call(
        "cublasGemmStridedBatchedEx" if batch else "cublasGemmEx",
        _handle(out),
        *flips[:2],
        *sizes,
        ctypes.byref(alpha),
        *operands[0],
        *operands[1],
        ctypes.byref(beta),
        *operands[2],
        *batch,
        _COMPUTE_32F,
        _DEFAULT_ALGORITHM,
    )
