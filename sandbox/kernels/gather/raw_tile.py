from pathlib import Path
from typing import Any

from sandbox.kernels.cuda import CudaKernel
from sandbox.kernels.gather import gather
from sandbox.kernels.gather.launch import kernel_arguments, widest_vector

KERNEL = CudaKernel(Path(__file__).with_suffix(".cu"), "gather_tile", overlap=True)
THREADS = 128
ROWS = 8
IN_FLIGHT = 5


@gather.variant("raw_tile", kind="cuda", preference=30)
def raw_tile(**arguments: Any) -> None:
    """A block a tile of rows as one flat run of 16-byte vectors, all loads in flight at once."""
    cache = arguments["cache"]
    macros = {
        "THREADS": THREADS,
        "ROWS": ROWS,
        "IN_FLIGHT": IN_FLIGHT,
        "VECTOR": widest_vector(cache, arguments["out"]),
        "ROW_BYTES": cache.shape[2] * cache.dtype.itemsize,
    }
    blocks = -(-arguments["num_tokens"] // ROWS)
    KERNEL(blocks, THREADS, *kernel_arguments(**arguments), macros=macros)
