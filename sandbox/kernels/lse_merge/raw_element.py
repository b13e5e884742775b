from pathlib import Path
from typing import Any

from sandbox.kernels.cuda import CudaKernel
from sandbox.kernels.lse_merge import lse_merge
from sandbox.kernels.lse_merge.launch import (
    merge_arrays,
    merge_macros,
    merge_options,
    merge_strides,
)

KERNEL = CudaKernel(Path(__file__).with_suffix(".cu"), "lse_merge_element")
MAX_THREADS = 256


@lse_merge.variant("raw_element", kind="cuda", preference=10)
def raw_element(**arguments: Any) -> None:
    """A block a row, a thread an element, each weighing the states for itself."""
    tokens, heads, head_dim = arguments["prefix"].shape
    KERNEL(
        tokens * heads,
        min(head_dim, MAX_THREADS),
        *merge_arrays(arguments),
        merge_strides(arguments),
        heads,
        head_dim,
        *merge_options(arguments),
        macros=merge_macros(arguments),
    )
