from pathlib import Path
from typing import Any

from sandbox.kernels.cuda import CudaKernel
from sandbox.kernels.gather import gather
from sandbox.kernels.gather.launch import kernel_arguments, widest_vector

KERNEL = CudaKernel(Path(__file__).with_suffix(".cu"), "gather_warp")
THREADS = 128


@gather.variant("raw_warp", kind="cuda", preference=20)
def raw_warp(**arguments: Any) -> None:
    """A warp a row, up to four 16-byte loads in flight a lane."""
    cache = arguments["cache"]
    macros = {
        "THREADS": THREADS,
        "VECTOR": widest_vector(cache, arguments["out"]),
        "ROW_BYTES": cache.shape[2] * cache.dtype.itemsize,
    }
    blocks = -(-arguments["num_tokens"] // (THREADS // 32))
    KERNEL(blocks, THREADS, *kernel_arguments(**arguments), macros=macros)
