from pathlib import Path
from typing import Any

from sandbox.kernels.cuda import CudaKernel
from sandbox.kernels.quantize import quantize_nvfp4
from sandbox.kernels.quantize.launch import group_grid, group_macros, rows, values_a_piece
from sandbox.kernels.quantize.reference import BLOCK

KERNEL = CudaKernel(Path(__file__).with_suffix(".cu"), "quantize_nvfp4_vector", overlap=True)
THREADS, IN_FLIGHT = 128, 2


def takes_pairs(x: Any, out: Any, **_: Any) -> str | None:
    if x.size and values_a_piece(x, out, BLOCK) < 2:
        return "x's rows must be whole pairs of values from each other: two codes share a byte"
    return None


@quantize_nvfp4.variant("raw_vector", kind="cuda", supports=takes_pairs, preference=30)
def raw_vector(x: Any, global_scale: Any, out: Any, out_scales: Any) -> None:
    """A thread a block: one pass, 8 bytes of codes a store, two blocks in flight."""
    macros = group_macros(x, out, BLOCK, THREADS, IN_FLIGHT)
    KERNEL(
        group_grid(x, macros),
        THREADS,
        *rows(x),
        global_scale,
        *rows(out),
        *rows(out_scales),
        out_scales.shape[1],
        macros=macros,
    )
