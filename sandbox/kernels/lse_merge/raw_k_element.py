from pathlib import Path
from typing import Any

from sandbox.kernels.cuda import CudaKernel
from sandbox.kernels.lse_merge import lse_merge_k
from sandbox.kernels.lse_merge.launch import base_factors, merge_k_arrays, merge_k_strides

KERNEL = CudaKernel(Path(__file__).with_suffix(".cu"), "lse_merge_k_element")
MAX_THREADS = 256


@lse_merge_k.variant("raw_element", kind="cuda", preference=10)
def raw_element(**arguments: Any) -> None:
    """A block a row, a thread an element, each walking the states twice."""
    states, tokens, heads, head_dim = arguments["partials"].shape
    KERNEL(
        tokens * heads,
        min(head_dim, MAX_THREADS),
        *merge_k_arrays(arguments),
        merge_k_strides(arguments),
        states,
        heads,
        head_dim,
        *base_factors(arguments),
        arguments["output_scale"],
        macros={"PARTIAL": arguments["partials"].dtype, "RESULT": arguments["out"].dtype},
    )
