from pathlib import Path
from typing import Any

from sandbox.kernels.cuda import CudaKernel
from sandbox.kernels.quantize import quantize_static
from sandbox.kernels.quantize.launch import rows, values_a_piece

KERNEL = CudaKernel(Path(__file__).with_suffix(".cu"), "quantize_static_vector", overlap=True)
THREADS, IN_FLIGHT = 128, 2


@quantize_static.variant("raw_vector", kind="cuda", preference=30)
def raw_vector(x: Any, scale: Any, out: Any) -> None:
    """A block some columns of a token, 16 codes a store and two of them in flight."""
    tokens, width = x.shape
    count = values_a_piece(x, out, width)
    macros = {"THREADS": THREADS, "IN_FLIGHT": IN_FLIGHT, "ELEMENT": x.dtype, "COUNT": count}
    pieces = width // count
    grid = (tokens, -(-pieces // (THREADS * IN_FLIGHT)))
    KERNEL(grid, THREADS, *rows(x), scale, *rows(out), pieces, macros=macros)
