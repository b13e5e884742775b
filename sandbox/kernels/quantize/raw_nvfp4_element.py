from pathlib import Path
from typing import Any

from sandbox.kernels.cuda import CudaKernel
from sandbox.kernels.quantize import quantize_nvfp4
from sandbox.kernels.quantize.launch import rows
from sandbox.kernels.quantize.reference import BLOCK

KERNEL = CudaKernel(Path(__file__).with_suffix(".cu"), "quantize_nvfp4_element")
THREADS = 64


@quantize_nvfp4.variant("raw_element", kind="cuda", preference=10)
def raw_element(x: Any, global_scale: Any, out: Any, out_scales: Any) -> None:
    """One thread a block of 16 values, which it reads twice."""
    KERNEL(
        -(-out_scales.size // THREADS),
        THREADS,
        *rows(x),
        global_scale,
        *rows(out),
        *rows(out_scales),
        out_scales.shape[1],
        out_scales.size,
        macros={"THREADS": THREADS, "ELEMENT": x.dtype, "GROUP": BLOCK},
    )
