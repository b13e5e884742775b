from pathlib import Path
from typing import Any

from sandbox.kernels.cuda import CudaKernel
from sandbox.kernels.sigmoid_gate import sigmoid_gate
from sandbox.kernels.strides import row_arrays
from sandbox.kernels.vectors import widest_vector

KERNEL = CudaKernel(Path(__file__).with_suffix(".cu"), "sigmoid_gate_vector", overlap=True)
THREADS = 128


@sigmoid_gate.variant("raw_vector", kind="cuda", preference=30)
def raw_vector(x: Any, gate: Any, out: Any) -> None:
    """A thread 16 bytes of a row."""
    tokens, columns = x.shape
    vector = widest_vector(x, gate, out)
    vectors = columns * x.dtype.itemsize // vector
    lanes = min(THREADS, 1 << (vectors - 1).bit_length())
    rows = THREADS // lanes
    KERNEL(
        (-(-tokens // rows), -(-vectors // lanes)),
        (lanes, rows),
        *row_arrays(x, gate, out),
        tokens,
        columns,
        macros={"ELEMENT": x.dtype, "VECTOR": vector, "THREADS": THREADS},
    )
