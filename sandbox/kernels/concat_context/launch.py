"""What the variants of concat_context pass to their kernels."""

from __future__ import annotations

from typing import Any

from sandbox.kernels.concat_insert.head_launch import halves, place
from sandbox.kernels.vectors import widest_vector


def key_vector(k_nope: Any, k_pe: Any, k_out: Any) -> int:
    """The widest access that both parts of a key allow, read and written."""
    return widest_vector(k_nope, k_pe, *halves(k_out, k_nope.shape[2]))


def key_arguments(k_nope: Any, k_pe: Any, k_out: Any) -> tuple[Any, ...]:
    return (*place(k_nope), k_pe, k_pe.strides[0], *place(k_out))


def fp8_arguments(
    k_nope: Any, k_pe: Any, v: Any, k_descale: Any, v_descale: Any, k_out: Any, v_out: Any
) -> tuple[Any, ...]:
    sources = (*place(k_nope), k_pe, k_pe.strides[0], *place(v))
    return (*sources, k_descale, v_descale, *place(k_out), *place(v_out))
