"""What the launchers of kernels that walk over the heads of a token share."""

from __future__ import annotations

from typing import Any

from sandbox.kernels.concat_insert.launch import widest_vector

ENOUGH_BLOCKS = 512
"""Fewer tokens than this are split by heads, so that all of a large GPU has work."""
FEWEST_HEADS = 8


def heads_a_block(tokens: int, heads: int) -> int:
    groups = max(1, min(ENOUGH_BLOCKS // max(1, tokens), heads // FEWEST_HEADS))
    return -(-heads // groups)


def place(heads: Any) -> tuple[Any, int, int]:
    """`[T, N, width]` as kernels take it: its address, bytes from token to token, head to head."""
    return heads, heads.strides[0], heads.strides[1]


def halves(heads: Any, width: int) -> tuple[Any, Any]:
    """The first columns of heads, and the others: parts that accesses must divide apart."""
    return heads[..., :width], heads[..., width:]


def codes_a_store(sources: list[Any], targets: list[Any], most: int) -> int:
    """How many codes, `most` or fewer, one store can write and whole accesses can read."""
    item, vector = sources[0].dtype.itemsize, widest_vector(*sources)
    codes = min(most, widest_vector(*targets))
    return codes if vector >= min(16, codes * item) else vector // item
