from pathlib import Path
from typing import Any

from sandbox.kernels.concat_context import concat_context_fp8
from sandbox.kernels.concat_context.launch import fp8_arguments
from sandbox.kernels.concat_insert.head_launch import codes_a_store, halves, heads_a_block
from sandbox.kernels.cuda import CudaKernel

KERNEL = CudaKernel(Path(__file__).with_suffix(".cu"), "concat_fp8_vector", overlap=True)
THREADS, IN_FLIGHT, BLOCKS_PER_SM = 256, 2, 4
MOST_CODES = 16
"""What one thread stores at a time."""


@concat_context_fp8.variant("raw_vector", kind="cuda", preference=30)
def raw_vector(**arguments: Any) -> None:
    """A block a token, keys and values side by side: 16-byte stores, four loads in flight."""
    k_nope, k_pe, v = (arguments[name] for name in ("k_nope", "k_pe", "v"))
    tokens, heads, nope = k_nope.shape
    targets = [*halves(arguments["k_out"], nope), arguments["v_out"]]
    macros = {
        "THREADS": THREADS,
        "IN_FLIGHT": IN_FLIGHT,
        "BLOCKS_PER_SM": BLOCKS_PER_SM,
        "COUNT": codes_a_store([k_nope, k_pe, v], targets, MOST_CODES),
        "ELEMENT": k_nope.dtype,
        "HEADS": heads,
        "NOPE": nope,
        "ROPE": k_pe.shape[1],
        "VALUE": v.shape[2],
    }
    in_block = heads_a_block(tokens, heads)
    grid = (tokens, -(-heads // in_block))
    KERNEL(grid, THREADS, *fp8_arguments(**arguments), in_block, macros=macros)
