from pathlib import Path
from typing import Any

from sandbox.kernels.cuda import CudaKernel
from sandbox.kernels.gather import gather
from sandbox.kernels.gather.launch import kernel_arguments, widest_vector
from sandbox.kernels.gather.restore import copies_only

KERNEL = CudaKernel(Path(__file__).with_suffix(".cu"), "gather_bulk", min_cc=(9, 0))
ROWS = 16
SHARED_BYTES = 200 * 1024


def _unsupported(**arguments: Any) -> str | None:
    if reason := copies_only(**arguments):
        return reason
    cache = arguments["cache"]
    if widest_vector(cache, arguments["out"]) < 16:
        return "rows must start at, and be, multiples of 16 bytes"
    if ROWS * cache.shape[2] * cache.dtype.itemsize > SHARED_BYTES:
        return f"{ROWS} rows do not fit the shared memory"
    return None


@gather.variant("raw_bulk", kind="cuda", min_cc=(9, 0), supports=_unsupported, preference=25)
def raw_bulk(**arguments: Any) -> None:
    """A lane a row through shared memory by the bulk copy engine, no value in a register."""
    row_bytes = arguments["cache"].shape[2] * arguments["cache"].dtype.itemsize
    macros = {"ROWS": ROWS, "ROW_BYTES": row_bytes}
    blocks = -(-arguments["num_tokens"] // ROWS)
    KERNEL(
        blocks,
        ROWS,
        *kernel_arguments(**arguments),
        macros=macros,
        shared_bytes=ROWS * row_bytes,
    )
