from typing import Any

from sandbox.kernels.linear import linear
from sandbox.kernels.products import matmul


@linear.variant("blas", kind="numpy", preference=30)
def blas(x: Any, weight: Any, bias: Any, out: Any) -> None:
    """cuBLAS on a GPU, NumPy in float32 on a CPU."""
    if bias is not None:
        out[...] = bias
    matmul(x, weight.T, out, accumulate=bias is not None)
