from pathlib import Path
from typing import Any

from sandbox.kernels.cuda import CudaKernel
from sandbox.kernels.rms_norm import rms_norm
from sandbox.kernels.strides import row_arrays

KERNEL = CudaKernel(Path(__file__).with_suffix(".cu"), "rms_norm_element")
THREADS = 128


@rms_norm.variant("raw_element", kind="cuda", preference=10)
def raw_element(x: Any, weight: Any, eps: float, out: Any) -> None:
    """A block a row, a thread an element, the row read twice."""
    tokens, columns = x.shape
    KERNEL(
        tokens,
        THREADS,
        *row_arrays(x),
        weight,
        *row_arrays(out),
        columns,
        1 / columns,
        eps,
        macros={"ELEMENT": x.dtype, "THREADS": THREADS},
    )
