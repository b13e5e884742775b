"""What the variants of the quantizing ops pass to their kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sandbox.kernels.vectors import widest_vector

MOST_VALUES = 16
"""What a thread loads at a time, and with E4M3 codes stores in 16 bytes."""


def rows(array: Any) -> tuple[Any, int]:
    """`[T, columns]` as kernels take it: its address, and bytes from token to token."""
    return array, array.strides[0]


def values_a_piece(x: Any, out: Any, group: int) -> int:
    """How many values, a power of two that divides the group, whole accesses can read and one store
    can write as codes."""
    item, vector = x.dtype.itemsize, widest_vector(x)
    most = math.gcd(MOST_VALUES, group, widest_vector(out) * (x.shape[1] // out.shape[1]))
    return most if vector >= min(16, most * item) else vector // item


def group_macros(x: Any, out: Any, group: int, threads: int, in_flight: int) -> dict[str, Any]:
    """The macros of `groups.cuh`."""
    return {
        "THREADS": threads,
        "IN_FLIGHT": in_flight,
        "ELEMENT": x.dtype,
        "GROUP": group,
        "COUNT": values_a_piece(x, out, group),
    }


def group_grid(x: Any, macros: Mapping[str, Any]) -> tuple[int, int]:
    """A block some groups of a token, in the order of tokens."""
    tokens, width = x.shape
    pieces = macros["GROUP"] // macros["COUNT"]
    lanes = min(32, 1 << (pieces - 1).bit_length())  # as groups.cuh has it
    groups_a_block = macros["THREADS"] // lanes * macros["IN_FLIGHT"]
    return tokens, -(-(width // macros["GROUP"]) // groups_a_block)
