from pathlib import Path
from typing import Any

from sandbox.kernels.cuda import CudaKernel
from sandbox.kernels.sigmoid_gate import sigmoid_gate
from sandbox.kernels.strides import row_arrays

KERNEL = CudaKernel(Path(__file__).with_suffix(".cu"), "sigmoid_gate_element")
THREADS = 256


@sigmoid_gate.variant("raw_element", kind="cuda", preference=10)
def raw_element(x: Any, gate: Any, out: Any) -> None:
    """A block a row, a thread an element."""
    macros = {"ELEMENT": x.dtype, "THREADS": THREADS}
    KERNEL(x.shape[0], THREADS, *row_arrays(x, gate, out), x.shape[1], macros=macros)
