from pathlib import Path
from typing import Any

from sandbox.kernels.cuda import CudaKernel
from sandbox.kernels.gather import dequantize_context
from sandbox.kernels.gather.restore import element_macros

KERNEL = CudaKernel(Path(__file__).with_suffix(".cu"), "dequantize_element")
THREADS = 256


@dequantize_context.variant("raw_element", kind="cuda", preference=10)
def raw_element(**arguments: Any) -> None:
    """One thread an element, or the two that share a byte."""
    codes, out = arguments["codes"], arguments["out"]
    macros = element_macros(**arguments)
    rows = codes.shape[0]
    KERNEL(
        -(-rows * out.shape[1] // (macros["COUNT"] * THREADS)),
        THREADS,
        codes,
        codes.strides[0],
        out,
        out.strides[0],
        rows,
        arguments["k_scale"],
        macros=macros,
    )
