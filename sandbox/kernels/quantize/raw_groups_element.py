from pathlib import Path
from typing import Any

from sandbox.kernels.cuda import CudaKernel
from sandbox.kernels.quantize import quantize_groups
from sandbox.kernels.quantize.launch import rows

KERNEL = CudaKernel(Path(__file__).with_suffix(".cu"), "quantize_groups_element")
THREADS = 64


@quantize_groups.variant("raw_element", kind="cuda", preference=10)
def raw_element(
    x: Any, group_size: int, scale_format: str, scale_layout: str, out: Any, out_scales: Any
) -> None:
    """One thread a group, which it reads twice."""
    KERNEL(
        -(-out_scales.size // THREADS),
        THREADS,
        *rows(x),
        *rows(out),
        *rows(out_scales),
        out_scales.strides[1],
        out_scales.shape[1],
        group_size,
        out_scales.size,
        scale_format == "ue8m0",
        macros={"THREADS": THREADS, "ELEMENT": x.dtype},
    )
