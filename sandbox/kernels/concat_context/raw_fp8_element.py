from pathlib import Path
from typing import Any

from sandbox.kernels.concat_context import concat_context_fp8
from sandbox.kernels.concat_context.launch import fp8_arguments
from sandbox.kernels.cuda import CudaKernel

KERNEL = CudaKernel(Path(__file__).with_suffix(".cu"), "concat_fp8_element")
THREADS = 256


@concat_context_fp8.variant("raw_element", kind="cuda", preference=10)
def raw_element(**arguments: Any) -> None:
    """One thread an element of any key or value."""
    k_nope, k_pe, v = (arguments[name] for name in ("k_nope", "k_pe", "v"))
    (tokens, heads, nope), rope, value = k_nope.shape, k_pe.shape[1], v.shape[2]
    macros = {
        "THREADS": THREADS,
        "ELEMENT": k_nope.dtype,
        "HEADS": heads,
        "NOPE": nope,
        "ROPE": rope,
        "VALUE": value,
    }
    elements = tokens * heads * (nope + rope + value)
    blocks = -(-elements // THREADS)
    KERNEL(blocks, THREADS, *fp8_arguments(**arguments), elements, macros=macros)
