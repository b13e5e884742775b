from pathlib import Path
from typing import Any

from sandbox.kernels.cuda import CudaKernel
from sandbox.kernels.gather import gather
from sandbox.kernels.gather.launch import kernel_arguments, widest_vector
from sandbox.kernels.gather.restore import no_vectors, restores, vector_macros

COPY = CudaKernel(Path(__file__).with_suffix(".cu"), "gather_tile", overlap=True)
RESTORE = CudaKernel(Path(__file__).with_name("raw_tile_restore.cu"), "restore_tile", overlap=True)
ROWS = 8
THREADS, IN_FLIGHT = 128, 5
RESTORE_ROWS, RESTORE_THREADS, RESTORE_IN_FLIGHT = 4, 96, 3
"""Four rows of 576 values, eight values at once, are three pieces for each of 96 threads."""


def unsupported(**arguments: Any) -> str | None:
    return no_vectors(arguments["cache"], **arguments) if restores(**arguments) else None


@gather.variant("raw_tile", kind="cuda", supports=unsupported, preference=30)
def raw_tile(**arguments: Any) -> None:
    """A block a tile of rows as one flat run of 16-byte vectors, all loads in flight at once."""
    cache, out = arguments["cache"], arguments["out"]
    restoring, passed = restores(cache, out), kernel_arguments(**arguments)
    rows = RESTORE_ROWS if restoring else ROWS
    blocks = -(-arguments["num_tokens"] // rows)
    if restoring:
        macros = {"THREADS": RESTORE_THREADS, "ROWS": rows, "MAX_IN_FLIGHT": RESTORE_IN_FLIGHT}
        macros |= vector_macros(cache, **arguments)
        RESTORE(blocks, RESTORE_THREADS, *passed, arguments["k_scale"], macros=macros)
    else:
        macros = {
            "THREADS": THREADS,
            "ROWS": rows,
            "IN_FLIGHT": IN_FLIGHT,
            "VECTOR": widest_vector(cache, out),
            "ROW_BYTES": cache.shape[2] * cache.dtype.itemsize,
        }
        COPY(blocks, THREADS, *passed, macros=macros)
