from pathlib import Path
from typing import Any

from sandbox.kernels.cuda import CudaKernel
from sandbox.kernels.lse_merge import lse_merge_k
from sandbox.kernels.lse_merge.launch import (
    base_factors,
    lanes_for,
    merge_k_arrays,
    merge_k_strides,
    vector_elements,
)

KERNEL = CudaKernel(Path(__file__).with_suffix(".cu"), "lse_merge_k_vector")
THREADS = 128
IN_FLIGHT = 4


@lse_merge_k.variant("raw_vector", kind="cuda", preference=20)
def raw_vector(**arguments: Any) -> None:
    """Up to a warp a stretch of a row: lanes share the weighing, partials are fetched ahead."""
    partials, out = arguments["partials"], arguments["out"]
    states, tokens, heads, head_dim = partials.shape
    if not tokens * heads:
        return
    elements = vector_elements(partials, out)
    vectors = head_dim // elements
    lanes = lanes_for(vectors)
    groups = tokens * heads * -(-vectors // lanes)
    KERNEL(
        -(-groups * lanes // THREADS),
        THREADS,
        *merge_k_arrays(arguments),
        merge_k_strides(arguments),
        states,
        tokens * heads,
        *base_factors(arguments),
        arguments["output_scale"],
        macros={
            "PARTIAL": partials.dtype,
            "RESULT": out.dtype,
            "HEADS": heads,
            "HEAD_DIM": head_dim,
            "ELEMENTS": elements,
            "THREADS": THREADS,
            "IN_FLIGHT": IN_FLIGHT,
        },
    )
