from pathlib import Path
from typing import Any

from sandbox.kernels.cuda import CudaKernel
from sandbox.kernels.quantise import quantise_static
from sandbox.kernels.quantise.launch import rows

KERNEL = CudaKernel(Path(__file__).with_suffix(".cu"), "quantise_static_element")
THREADS = 256


@quantise_static.variant("raw_element", kind="cuda", preference=10)
def raw_element(x: Any, scale: Any, out: Any) -> None:
    """One thread a value."""
    blocks = -(-x.size // THREADS)
    macros = {"THREADS": THREADS, "ELEMENT": x.dtype}
    KERNEL(blocks, THREADS, *rows(x), scale, *rows(out), x.shape[1], x.size, macros=macros)
