from pathlib import Path
from typing import Any

from sandbox.kernels.concat_insert.launch import widest_vector
from sandbox.kernels.cuda import CudaKernel
from sandbox.kernels.sigmoid_gate import sigmoid_gate
from sandbox.kernels.sigmoid_gate.launch import row_arrays

KERNEL = CudaKernel(Path(__file__).with_suffix(".cu"), "sigmoid_gate_vector", overlap=True)
THREADS = 128
FULL_GPU = 1 << 18
"""Threads that a large GPU holds at a time, about; below it each has one vector."""


@sigmoid_gate.variant("raw_vector", kind="cuda", preference=30)
def raw_vector(x: Any, gate: Any, out: Any) -> None:
    """A thread 16 bytes of a row, or twice as many where a GPU is full."""
    tokens, columns = x.shape
    vector = widest_vector(x, gate, out)
    vectors = columns * x.dtype.itemsize // vector
    lanes = min(THREADS, 1 << (vectors - 1).bit_length())
    in_flight = 2 if tokens * vectors >= FULL_GPU else 1
    rows = THREADS // lanes
    KERNEL(
        (-(-tokens // rows), -(-vectors // (lanes * in_flight))),
        (lanes, rows),
        *row_arrays(x, gate, out),
        tokens,
        columns,
        macros={
            "ELEMENT": x.dtype,
            "VECTOR": vector,
            "IN_FLIGHT": in_flight,
            "THREADS": THREADS,
        },
    )
