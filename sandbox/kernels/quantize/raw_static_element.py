from pathlib import Path
from typing import Any

from sandbox.kernels.cuda import CudaKernel
from sandbox.kernels.quantize import quantize_static
from sandbox.kernels.quantize.launch import rows

KERNEL = CudaKernel(Path(__file__).with_suffix(".cu"), "quantize_static_element")
THREADS = 256


@quantize_static.variant("raw_element", kind="cuda", preference=10)
def raw_element(x: Any, scale: Any, out: Any) -> None:
    """One thread a value."""
    blocks = -(-x.size // THREADS)
    macros = {"THREADS": THREADS, "ELEMENT": x.dtype}
    KERNEL(blocks, THREADS, *rows(x), scale, *rows(out), x.shape[1], x.size, macros=macros)
