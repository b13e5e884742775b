from pathlib import Path
from typing import Any

from sandbox.kernels.cuda import CudaKernel
from sandbox.kernels.gather import gather
from sandbox.kernels.gather.launch import kernel_arguments
from sandbox.kernels.gather.restore import element_macros, restores

COPY = CudaKernel(Path(__file__).with_suffix(".cu"), "gather_element")
RESTORE = CudaKernel(Path(__file__).with_name("raw_element_restore.cu"), "restore_element")
THREADS = 256


@gather.variant("raw_element", kind="cuda", preference=10)
def raw_element(**arguments: Any) -> None:
    """One thread an element, each looking its row up for itself."""
    cache, out, tokens = arguments["cache"], arguments["out"], arguments["num_tokens"]
    passed = kernel_arguments(**arguments)
    if restores(cache, out):
        macros = element_macros(**arguments)
        blocks = -(-tokens * out.shape[1] // (macros["COUNT"] * THREADS))
        RESTORE(blocks, THREADS, *passed, arguments["k_scale"], macros=macros)
    else:
        macros = {"ELEMENT_BYTES": cache.dtype.itemsize, "ROW": cache.shape[2]}
        COPY(-(-tokens * cache.shape[2] // THREADS), THREADS, *passed, macros=macros)
