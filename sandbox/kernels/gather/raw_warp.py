from pathlib import Path
from typing import Any

from sandbox.kernels.cuda import CudaKernel
from sandbox.kernels.gather import gather
from sandbox.kernels.gather.launch import kernel_arguments, widest_vector

KERNEL = CudaKernel(Path(__file__).with_suffix(".cu"), "gather_warp", overlap=True)
THREADS = 64
ROWS = 2
FEW_TOKENS = 4096
"""Up to so many a warp takes one row, so that more warps share the latency."""
MAX_IN_FLIGHT = 8


@gather.variant("raw_warp", kind="cuda", preference=40)
def raw_warp(**arguments: Any) -> None:
    """A warp a row or two as one flat run of 16-byte vectors, found by all lanes together."""
    cache = arguments["cache"]
    rows = 1 if arguments["num_tokens"] <= FEW_TOKENS else ROWS
    macros = {
        "THREADS": THREADS,
        "ROWS": rows,
        "MAX_IN_FLIGHT": MAX_IN_FLIGHT,
        "VECTOR": widest_vector(cache, arguments["out"]),
        "ROW_BYTES": cache.shape[2] * cache.dtype.itemsize,
    }
    blocks = -(-arguments["num_tokens"] // (rows * THREADS // 32))
    KERNEL(blocks, THREADS, *kernel_arguments(**arguments), macros=macros)
