from pathlib import Path
from typing import Any

from sandbox.kernels.cuda import CudaKernel
from sandbox.kernels.gather import gather
from sandbox.kernels.gather.launch import kernel_arguments

KERNEL = CudaKernel(Path(__file__).with_suffix(".cu"), "gather_element")
THREADS = 256


@gather.variant("raw_element", kind="cuda", preference=10)
def raw_element(**arguments: Any) -> None:
    """One thread an element, each looking its row up for itself."""
    cache = arguments["cache"]
    elements = arguments["num_tokens"] * cache.shape[2]
    macros = {"ELEMENT_BYTES": cache.dtype.itemsize, "ROW": cache.shape[2]}
    KERNEL(-(-elements // THREADS), THREADS, *kernel_arguments(**arguments), macros=macros)
