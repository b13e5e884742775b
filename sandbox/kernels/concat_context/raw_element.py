from pathlib import Path
from typing import Any

from sandbox.kernels.concat_context import concat_context
from sandbox.kernels.concat_context.launch import key_arguments
from sandbox.kernels.cuda import CudaKernel

KERNEL = CudaKernel(Path(__file__).with_suffix(".cu"), "concat_element")
THREADS = 256


@concat_context.variant("raw_element", kind="cuda", preference=10)
def raw_element(k_nope: Any, k_pe: Any, k_out: Any) -> None:
    """One thread an element of any key."""
    (tokens, heads, nope), rope = k_nope.shape, k_pe.shape[1]
    macros = {
        "THREADS": THREADS,
        "SIZE": k_nope.dtype.itemsize,
        "HEADS": heads,
        "NOPE": nope,
        "ROPE": rope,
    }
    elements = tokens * heads * (nope + rope)
    blocks = -(-elements // THREADS)
    KERNEL(blocks, THREADS, *key_arguments(k_nope, k_pe, k_out), elements, macros=macros)
