from pathlib import Path
from typing import Any

from sandbox.kernels.cuda import CudaKernel
from sandbox.kernels.quantize import quantize_groups
from sandbox.kernels.quantize.launch import group_grid, group_macros, rows

KERNEL = CudaKernel(Path(__file__).with_suffix(".cu"), "quantize_groups_vector", overlap=True)
THREADS, IN_FLIGHT = 128, 2


@quantize_groups.variant("raw_vector", kind="cuda", preference=30)
def raw_vector(
    x: Any, group_size: int, scale_format: str, scale_layout: str, out: Any, out_scales: Any
) -> None:
    """Part of a warp a group: one pass, 16 codes a store, shuffles, two groups in flight."""
    macros = group_macros(x, out, group_size, THREADS, IN_FLIGHT)
    KERNEL(
        group_grid(x, macros),
        THREADS,
        *rows(x),
        *rows(out),
        *rows(out_scales),
        out_scales.strides[1],
        out_scales.shape[1],
        scale_format == "ue8m0",
        macros=macros,
    )
