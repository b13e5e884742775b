from pathlib import Path
from typing import Any

from sandbox.kernels.cuda import CudaKernel
from sandbox.kernels.lse_merge import lse_merge
from sandbox.kernels.lse_merge.launch import (
    merge_arrays,
    merge_macros,
    merge_options,
    packed_strides,
    vector_elements,
)

KERNEL = CudaKernel(Path(__file__).with_suffix(".cu"), "lse_merge_tile", overlap=True)
THREADS = 256
IN_FLIGHT = 2
ENOUGH_TOKENS = 64
LSE_SECTOR = 8
"""Tokens whose LSEs share one 32-byte sector in the layout NT."""


def _preference(prefix: Any, output_scale: Any = None, **others: Any) -> int:
    """Codes take registers that a tile lacks."""
    return 40 if prefix.shape[0] >= ENOUGH_TOKENS and output_scale is None else 20


@lse_merge.variant("raw_tile", kind="cuda", preference=_preference)
def raw_tile(**arguments: Any) -> None:
    """A block a tile of rows, each row weighed once into shared memory under way of its loads."""
    prefix = arguments["prefix"]
    tokens, heads, head_dim = prefix.shape
    if not tokens * heads:
        return
    elements = vector_elements(prefix, arguments["suffix"], arguments["out"])
    rows = max(1, THREADS * IN_FLIGHT * elements // head_dim)
    along_tokens = arguments["lse_layout"] == "NT" and tokens >= LSE_SECTOR <= rows
    tile_tokens = LSE_SECTOR if along_tokens else 1
    tile_heads = min(rows // tile_tokens, heads)
    strides, packed = packed_strides(arguments)
    KERNEL(
        -(-tokens // tile_tokens) * -(-heads // tile_heads),
        THREADS,
        *merge_arrays(arguments),
        strides,
        tokens,
        *merge_options(arguments),
        macros={
            **merge_macros(arguments),
            "HEADS": heads,
            "HEAD_DIM": head_dim,
            "PACKED": packed,
            "TILE_TOKENS": tile_tokens,
            "TILE_HEADS": tile_heads,
            "ELEMENTS": elements,
            "THREADS": THREADS,
            "IN_FLIGHT": IN_FLIGHT,
        },
    )
