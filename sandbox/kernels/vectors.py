"""How wide the accesses of a kernel to its arrays can be."""

from __future__ import annotations

from typing import Any

from sandbox import arrays


def widest_vector(*pieces: Any) -> int:
    """Bytes of the widest access, 16 at most, that every row of every array allows."""
    together = 16
    for piece in pieces:
        if piece is None or not piece.size:
            continue
        together |= piece.shape[-1] * piece.dtype.itemsize | arrays.address(piece)
        for length, stride in zip(piece.shape[:-1], piece.strides):
            together |= stride if length > 1 else 0
    return together & -together
