from pathlib import Path
from typing import Any

from sandbox.kernels.concat_context import concat_context
from sandbox.kernels.concat_context.launch import key_arguments, key_vector
from sandbox.kernels.concat_insert.head_launch import heads_a_block
from sandbox.kernels.cuda import CudaKernel

KERNEL = CudaKernel(Path(__file__).with_suffix(".cu"), "concat_vector", overlap=True)
THREADS, IN_FLIGHT = 384, 4


@concat_context.variant("raw_vector", kind="cuda", preference=30)
def raw_vector(k_nope: Any, k_pe: Any, k_out: Any) -> None:
    """A block a token: threads stay at their 16 bytes of a head, four loads in flight."""
    (tokens, heads, nope), item = k_nope.shape, k_nope.dtype.itemsize
    in_block = heads_a_block(tokens, heads)
    macros = {
        "THREADS": THREADS,
        "IN_FLIGHT": IN_FLIGHT,
        "VECTOR": key_vector(k_nope, k_pe, k_out),
        "HEADS": heads,
        "NOPE_BYTES": nope * item,
        "ROPE_BYTES": k_pe.shape[1] * item,
    }
    grid = (tokens, -(-heads // in_block))
    KERNEL(grid, THREADS, *key_arguments(k_nope, k_pe, k_out), in_block, macros=macros)
