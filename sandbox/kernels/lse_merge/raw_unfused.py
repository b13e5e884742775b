import struct
from pathlib import Path
from typing import Any

from sandbox import arrays
from sandbox.kernels.cuda import CudaKernel
from sandbox.kernels.lse_merge import lse_merge
from sandbox.kernels.lse_merge.launch import vector_elements
from sandbox.kernels.lse_merge.raw_tile import ENOUGH_TOKENS, raw_tile
from sandbox.kernels.lse_merge.raw_vector import raw_vector

QUANTIZE = CudaKernel(
    Path(__file__).with_name("unfused_quantize.cu"), "quantize_rows", overlap=True
)
THREADS = 256
IN_FLIGHT = 2


def _needs_scale(output_scale: Any, **others: Any) -> str | None:
    return "without output_scale there is nothing to fuse" if output_scale is None else None


@lse_merge.variant("raw_unfused", kind="cuda", supports=_needs_scale, preference=2)
def raw_unfused(**arguments: Any) -> None:
    """A launch each: merge in the states' dtype, then make codes of it."""
    prefix, out = arguments["prefix"], arguments["out"]
    tokens, heads, head_dim = prefix.shape
    merged = arrays.namespace(prefix).empty(prefix.shape, prefix.dtype)
    merge = raw_tile if tokens >= ENOUGH_TOKENS else raw_vector
    merge(**arguments | {"out": merged, "output_scale": None})
    elements = vector_elements(merged, out)
    QUANTIZE(
        -(-tokens * heads * (head_dim // elements) // (THREADS * IN_FLIGHT)),
        THREADS,
        merged,
        out,
        struct.pack("2q", *out.strides[:2]),
        tokens,
        arguments["output_scale"],
        macros={
            "ELEMENT": prefix.dtype,
            "HEADS": heads,
            "HEAD_DIM": head_dim,
            "ELEMENTS": elements,
            "THREADS": THREADS,
            "IN_FLIGHT": IN_FLIGHT,
        },
    )
