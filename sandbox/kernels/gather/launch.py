"""What the raw variants of gather pass to their kernels."""

from __future__ import annotations

from typing import Any

from sandbox import arrays
from sandbox.kernels.strides import element_strides


def kernel_arguments(
    cache: Any,
    block_table: Any,
    cu_seq_lens: Any,
    seq_starts: Any,
    num_tokens: int,
    out: Any,
    **_: Any,
) -> tuple[Any, ...]:
    """Arguments in the order that every gather kernel declares; strides of rows in bytes."""
    num_blocks, block_size, _ = cache.shape
    requests, columns = block_table.shape
    return (
        cache,
        cache.strides[0],
        cache.strides[1],
        block_size,
        num_blocks,
        block_table,
        element_strides(block_table)[0],
        columns,
        cu_seq_lens,
        requests,
        seq_starts,
        out,
        out.strides[0],
        num_tokens,
    )


def widest_vector(cache: Any, out: Any) -> int:
    """Bytes of the widest access that every row of both arrays allows, 16 at most."""
    item = cache.dtype.itemsize
    places = (arrays.address(cache), arrays.address(out), *cache.strides[:2], out.strides[0])
    row_bytes = cache.shape[2] * item
    for width in (16, 8, 4, 2, 1):
        if row_bytes % width == 0 and all(place % width == 0 for place in places):
            return width
    return 1
