from pathlib import Path
from typing import Any

from sandbox.kernels.cuda import CudaKernel
from sandbox.kernels.lse_merge import lse_merge
from sandbox.kernels.lse_merge.launch import (
    lanes_for,
    merge_arrays,
    merge_macros,
    merge_options,
    packed_strides,
    vector_elements,
)

KERNEL = CudaKernel(Path(__file__).with_suffix(".cu"), "lse_merge_vector", overlap=True)
THREADS = 128
MAX_IN_FLIGHT = 4


@lse_merge.variant("raw_vector", kind="cuda", preference=30)
def raw_vector(**arguments: Any) -> None:
    """Part of a warp a row in 16-byte vectors, loaded before the weights are known."""
    prefix = arguments["prefix"]
    tokens, heads, head_dim = prefix.shape
    if not tokens * heads:
        return
    elements = vector_elements(prefix, arguments["suffix"], arguments["out"])
    lanes = lanes_for(head_dim // elements)
    strides, packed = packed_strides(arguments)
    KERNEL(
        -(-tokens * heads * lanes // THREADS),
        THREADS,
        *merge_arrays(arguments),
        strides,
        tokens * heads,
        *merge_options(arguments),
        macros={
            **merge_macros(arguments),
            "HEADS": heads,
            "HEAD_DIM": head_dim,
            "PACKED": packed,
            "ELEMENTS": elements,
            "THREADS": THREADS,
            "MAX_IN_FLIGHT": MAX_IN_FLIGHT,
        },
    )
