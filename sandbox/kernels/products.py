"""Matrix products: cuBLAS on a GPU, NumPy in float32 on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from sandbox.kernels import cublas


def matmul(a: Any, b: Any, out: Any, *, accumulate: bool = False) -> None:
    """`out = a @ b`, or `out += a @ b` with `accumulate`; summed in float32 and rounded once.

    Args:
        a, b: `[M, K]` and `[K, N]`, or `[B, M, K]` and `[B, K, N]`, of one dtype: float32, float16
            or bfloat16. Any views of which one of the last two axes is contiguous.
        out: `[M, N]` or `[B, M, N]` of that dtype, its last axis contiguous.
    """
    if out.size == 0:
        return
    if not isinstance(out, np.ndarray):
        cublas.product(a, b, out, accumulate)
        return
    with np.errstate(all="ignore"):
        product = np.matmul(a.astype(np.float32), b.astype(np.float32))
        if accumulate:
            product += out.astype(np.float32)
        out[...] = product.astype(out.dtype)
