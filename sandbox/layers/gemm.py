"""Matrix products: cuBLAS through CuPy on a GPU, NumPy in float32 on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from sandbox import arrays

_ONE, _ZERO = np.ones(1, np.float32), np.zeros(1, np.float32)


def linear(x: Any, weight: Any, out: Any, bias: Any = None, handle: int | None = None) -> None:
    """`out = x @ weight.T + bias`, summed in float32 and rounded once.

    Args:
        x: `[T, I]`, float32, float16 or bfloat16; rows may be strided.
        weight: `[O, I]` of that dtype, rows may be strided.
        out: `[T, O]`, likewise.
        bias: `[O]` or None.
        handle: as for `matmul`.
    """
    if bias is not None:
        out[...] = bias
    matmul(x, weight.T, out, accumulate=bias is not None, handle=handle)


def matmul(
    a: Any, b: Any, out: Any, *, accumulate: bool = False, handle: int | None = None
) -> None:
    """`out = a @ b`, or `out += a @ b` with `accumulate`; summed in float32 and rounded once.

    Args:
        a, b: `[M, K]` and `[K, N]`, or `[B, M, K]` and `[B, K, N]`, of one dtype: float32, float16
            or bfloat16. Any views of which one of the last two axes is contiguous.
        out: `[M, N]` or `[B, M, N]` of that dtype, its last axis contiguous.
        handle: a cuBLAS handle; None is CuPy's own.
    """
    if out.size == 0:
        return
    if isinstance(out, np.ndarray):
        _on_cpu(a, b, out, accumulate)
    else:
        _cublas(a, b, out, accumulate, handle)


def _on_cpu(a: Any, b: Any, out: Any, accumulate: bool) -> None:
    with np.errstate(all="ignore"):
        product = np.matmul(a.astype(np.float32), b.astype(np.float32))
        if accumulate:
            product += out.astype(np.float32)
        out[...] = product.astype(out.dtype)


def _leading(array: Any) -> tuple[int, bool]:
    """The stride between rows in elements, and whether rows and columns stand the other way."""
    rows, columns = array.shape[-2:]
    step, inner = (stride // array.dtype.itemsize for stride in array.strides[-2:])
    if inner == 1 or columns == 1:
        return (max(step, columns) if rows > 1 else columns), False
    return (max(inner, rows) if columns > 1 else rows), True


def _cublas(a: Any, b: Any, out: Any, accumulate: bool, handle: int | None) -> None:
    """cuBLAS counts columns first, in which `out.T = b.T @ a.T` is what is stored."""
    cupy = arrays.import_cupy()
    cublas = cupy.cuda.cublas
    kind = {
        "float32": cupy.cuda.runtime.CUDA_R_32F,
        "float16": cupy.cuda.runtime.CUDA_R_16F,
        "bfloat16": cupy.cuda.runtime.CUDA_R_16BF,
    }[out.dtype.name]
    (step_a, flip_a), (step_b, flip_b) = _leading(a), _leading(b)
    step_out, _ = _leading(out)
    rows, columns = out.shape[-2:]
    flips = [cublas.CUBLAS_OP_T if flip else cublas.CUBLAS_OP_N for flip in (flip_b, flip_a)]
    alpha, beta = _ONE.ctypes.data, (_ONE if accumulate else _ZERO).ctypes.data
    sizes = (columns, rows, a.shape[-1])
    one = [
        (array.data.ptr, kind, step) for array, step in ((b, step_b), (a, step_a), (out, step_out))
    ]
    handle = cupy.cuda.device.get_cublas_handle() if handle is None else handle
    how = (cublas.CUBLAS_COMPUTE_32F, cublas.CUBLAS_GEMM_DEFAULT)
    if out.ndim == 2:
        cublas.gemmEx(handle, *flips, *sizes, alpha, *one[0], *one[1], beta, *one[2], *how)
        return
    item = out.dtype.itemsize
    of_b, of_a, of_out = (
        (*single, array.strides[0] // item) for single, array in zip(one, (b, a, out))
    )
    cublas.gemmStridedBatchedEx(
        handle, *flips, *sizes, alpha, *of_b, *of_a, beta, *of_out, out.shape[0], *how
    )
