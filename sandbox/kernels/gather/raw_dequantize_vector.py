from pathlib import Path
from typing import Any

from sandbox.kernels.cuda import CudaKernel
from sandbox.kernels.gather import dequantize_context
from sandbox.kernels.gather.restore import no_vectors, vector_macros

KERNEL = CudaKernel(Path(__file__).with_suffix(".cu"), "dequantize_vector", overlap=True)
THREADS, ROWS, IN_FLIGHT = 192, 8, 3
"""Eight rows of 576 values, eight values at once, are three pieces for each thread."""


def _unsupported(**arguments: Any) -> str | None:
    return no_vectors(arguments["codes"], **arguments)


@dequantize_context.variant("raw_vector", kind="cuda", supports=_unsupported, preference=30)
def raw_vector(**arguments: Any) -> None:
    """A block a tile of rows as one flat run of 16-byte vectors, all loads in flight at once."""
    restore_rows(**arguments)


def restore_rows(
    codes: Any, out: Any, k_scale: Any, cu_seq_lens: Any = None, **format_of_rows: Any
) -> None:
    """Restore all rows of `codes`, or with `cu_seq_lens` those that belong to a request."""
    rows = codes.shape[0]
    macros = {"THREADS": THREADS, "ROWS": ROWS, "MAX_IN_FLIGHT": IN_FLIGHT}
    KERNEL(
        -(-rows // ROWS),
        THREADS,
        codes,
        codes.strides[0],
        out,
        out.strides[0],
        rows,
        k_scale,
        cu_seq_lens,
        0 if cu_seq_lens is None else len(cu_seq_lens) - 1,
        macros=macros | vector_macros(codes, out, **format_of_rows),
    )
