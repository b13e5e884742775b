from pathlib import Path
from typing import Any

from sandbox.kernels.cuda import CudaKernel
from sandbox.kernels.gather import gather
from sandbox.kernels.gather.launch import kernel_arguments, widest_vector
from sandbox.kernels.gather.raw_tile import unsupported
from sandbox.kernels.gather.restore import restores, vector_macros

COPY = CudaKernel(Path(__file__).with_suffix(".cu"), "gather_warp", overlap=True)
RESTORE = CudaKernel(Path(__file__).with_name("raw_warp_restore.cu"), "restore_warp", overlap=True)
THREADS = 64
ROWS, MAX_IN_FLIGHT = 2, 8
RESTORE_ROWS, RESTORE_MAX_IN_FLIGHT = 2, 5
"""Two rows of 576 values, eight values at once, are four and a half pieces for each lane."""
FEW_TOKENS = 4096
"""Up to so many a warp takes one row, so that more warps share the latency."""


@gather.variant("raw_warp", kind="cuda", supports=unsupported, preference=40)
def raw_warp(**arguments: Any) -> None:
    """A warp a few rows as one flat run of 16-byte vectors, found by all lanes together."""
    cache, out, tokens = arguments["cache"], arguments["out"], arguments["num_tokens"]
    passed, restoring = kernel_arguments(**arguments), restores(cache, out)
    rows = RESTORE_ROWS if restoring else ROWS
    rows = 1 if tokens <= FEW_TOKENS else rows
    blocks = -(-tokens // (rows * THREADS // 32))
    if restoring:
        macros = {"THREADS": THREADS, "ROWS": rows, "MAX_IN_FLIGHT": RESTORE_MAX_IN_FLIGHT}
        macros |= vector_macros(cache, **arguments)
        RESTORE(blocks, THREADS, *passed, arguments["k_scale"], macros=macros)
    else:
        macros = {
            "THREADS": THREADS,
            "ROWS": rows,
            "MAX_IN_FLIGHT": MAX_IN_FLIGHT,
            "VECTOR": widest_vector(cache, out),
            "ROW_BYTES": cache.shape[2] * cache.dtype.itemsize,
        }
        COPY(blocks, THREADS, *passed, macros=macros)
