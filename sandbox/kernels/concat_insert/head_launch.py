"""What the launchers of kernels that walk over the heads of a token share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sandbox.kernels.concat_insert.launch import insert_arguments, table_arguments
from sandbox.kernels.vectors import widest_vector

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


def prefill_fp8_arguments(arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    sources = [part for name in ("q", "k_nope", "v") for part in place(arguments[name])]
    targets = [part for name in ("q_out", "k_out", "v_out") for part in place(arguments[name])]
    descales = [arguments[name] for name in ("q_descale", "k_descale", "v_descale")]
    rotation = (arguments["positions"], *table_arguments(arguments["cos_sin"]))
    return (*sources, *insert_arguments(arguments), *rotation, *descales, *targets)
