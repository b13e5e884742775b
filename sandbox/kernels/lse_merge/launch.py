"""What the variants of both merges pass to their kernels."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from sandbox import arrays
from sandbox.kernels.lse import NATURAL
from sandbox.kernels.strides import element_strides

VECTOR_BYTES = 16


def base_factors(arguments: Mapping[str, Any]) -> tuple[float, float]:
    """Factors from the LSEs' base to natural logarithms and back."""
    natural = NATURAL[arguments["lse_base"]]
    return natural, 1.0 / natural


def merge_arrays(arguments: Mapping[str, Any]) -> list[Any]:
    """The arrays of lse_merge in the order that its kernels declare."""
    names = ("prefix", "prefix_lse", "suffix", "suffix_lse", "out", "out_lse")
    return [arguments[name] for name in names]


def merge_options(arguments: Mapping[str, Any]) -> tuple[float, float, Any, int]:
    """The last arguments of the kernels of lse_merge."""
    return *base_factors(arguments), arguments["output_scale"], arguments["context_tokens"]


def merge_macros(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The macros that all kernels of lse_merge take."""
    prefix = arguments["prefix"]
    return {
        "ELEMENT": prefix.dtype,
        "RESULT": arguments["out"].dtype,
        "CONTEXT": arguments["context_tokens"] < prefix.shape[0],
    }


def merge_strides(arguments: Mapping[str, Any]) -> bytes:
    """`MergeStrides` of `merge.cuh` for arrays with strides of their own."""
    return struct.pack("12q", *_all_strides(arguments))


def packed_strides(arguments: Mapping[str, Any]) -> tuple[bytes, int]:
    """`MergeStrides` and its macro `PACKED`: 1 or 2 where no array has padding and the LSEs are
    `[N, T]` or `[T, N]`, 0 otherwise."""
    by_token = arguments["lse_layout"] == "TN"
    tokens, heads, head_dim = arguments["prefix"].shape
    state = [heads * head_dim, head_dim]
    lse = [heads, 1] if by_token else [1, tokens]
    strides = _all_strides(arguments)
    if strides in (3 * (state + lse), 2 * (state + lse) + state + [0, 0]):
        return struct.pack("q", tokens), 2 if by_token else 1
    return struct.pack("12q", *strides), 0


def _all_strides(arguments: Mapping[str, Any]) -> list[int]:
    strides: list[int] = []
    for name in ("prefix", "suffix", "out"):
        strides += _state_strides(arguments[name])
        strides += _lse_strides(arguments[f"{name}_lse"], arguments["lse_layout"])
    return strides


def merge_k_arrays(arguments: Mapping[str, Any]) -> list[Any]:
    """The arrays of lse_merge_k in the order that its kernels declare."""
    return [arguments[name] for name in ("partials", "lses", "out", "out_lse")]


def merge_k_strides(arguments: Mapping[str, Any]) -> bytes:
    """`MergeKStrides` of `merge_k.cuh`."""
    layout = arguments["lse_layout"]
    strides: list[int] = []
    for state, lse in (("partials", "lses"), ("out", "out_lse")):
        strides += _state_strides(arguments[state])
        strides += _lse_strides(arguments[lse], layout)
    strides += [element_strides(arguments[name])[0] for name in ("partials", "lses")]
    return struct.pack("10q", *strides)


def _state_strides(state: Any) -> tuple[int, int]:
    """Elements between tokens and between heads."""
    return element_strides(state)[-3:-1]


def _lse_strides(lse: Any, layout: str) -> tuple[int, int]:
    if lse is None:
        return 0, 0
    first, second = element_strides(lse)[-2:]
    return (second, first) if layout == "NT" else (first, second)


def vector_elements(*rows: Any, limit: int = VECTOR_BYTES) -> int:
    """Elements of the widest access, `limit` bytes at most, that every row of the arrays allows.

    That is the largest power of two that divides every length, stride and address in elements.
    """
    places = limit // max(array.dtype.itemsize for array in rows)
    for array in rows:
        item = array.dtype.itemsize
        places |= array.shape[-1] | arrays.address(array) // item
        for length, stride in zip(array.shape[:-1], array.strides):
            if length > 1:
                places |= stride // item
    return places & -places


def lanes_for(vectors: int) -> int:
    """Lanes that share a row of so many vectors, as `merge.cuh` has it."""
    return min(32, 1 << (vectors - 1).bit_length())
