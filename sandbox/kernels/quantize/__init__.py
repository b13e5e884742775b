"""The output of attention as codes for a quantized projection: E4M3 with one descale or one a group
of values, or E2M1 with two levels of scales."""

from __future__ import annotations

from typing import Any

import numpy as np

from sandbox.kernels import cache_arguments, require
from sandbox.kernels.op import Output, operation
from sandbox.kernels.quantize import cases, reference
from sandbox.kernels.quantize.decode import (
    dequantize_groups,
    dequantize_nvfp4,
    dequantize_static,
)

__all__ = [
    "dequantize_groups",
    "dequantize_nvfp4",
    "dequantize_static",
    "quantize_groups",
    "quantize_nvfp4",
    "quantize_static",
]

CODES, FLOAT32 = np.dtype(np.uint8), np.dtype(np.float32)
GROUP_STEP, LARGEST_GROUP = 8, 1024
SCALE_ALIGNMENT = 16
"""Bytes that TMA wants the columns of a matrix to be a multiple of."""


def _check_multiple(x: Any, group: int, what: str) -> None:
    if x.shape[1] % group:
        raise ValueError(
            f"x has shape {tuple(x.shape)}: W must be a multiple of {group}, the values of {what}"
        )


def _check_outputs(outputs: dict[str, Any], inputs: dict[str, Any]) -> None:
    axes = dict.fromkeys(outputs, ("tokens", "columns"))
    require.outputs(outputs, axes, inputs)


def _check_values(scale: Any = None, global_scale: Any = None, **others: Any) -> None:
    cache_arguments.positive_scales(scale=scale, global_scale=global_scale)


@operation(
    reference=reference.quantize_static,
    make_inputs=cases.static_inputs,
    cases=cases.static_cases,
    workload_case=cases.static_workload,
    cost=cases.static_cost,
    tolerance=cases.tolerance,
    check_values=_check_values,
    returns=("out",),
    main_argument="x",
)
def quantize_static(x: Any, scale: Any, *, out: Any = None) -> dict[str, Any]:
    """Values as E4M3 codes that share one descale.

    A code is that of `x * (1 / scale)`, a float32 reciprocal and a float32 product, to nearest
    even, saturating at 448; a NaN becomes 0x7F. A reader takes `code * scale`. x does not change.

    Args:
        x: `[T, W]`, float32, float16 or bfloat16; rows may be strided.
        scale: the descale, positive: a number, or a float32 array of one element, which may change
            between replays of a graph.
        out: uint8 `[T, W]`; rows may be strided; shares no memory with the inputs. None allocates.

    Returns:
        `out`.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, dtype, rank or shape, `out` shares
            memory with an input, or (where values are checked) `scale` is not positive, normal and
            finite; nothing has been launched.
    """
    require.rows(x, "x", "W")
    shape = x.shape
    scale = cache_arguments.scale(scale, "scale", x)
    _check_outputs({"out": out}, {"x": x, "scale": scale})
    return {"scale": scale, "out": Output(shape, CODES)}


@operation(
    reference=reference.quantize_groups,
    make_inputs=cases.groups_inputs,
    cases=cases.groups_cases,
    workload_case=cases.groups_workload,
    cost=cases.groups_cost,
    tolerance=cases.tolerance,
    returns=("out", "out_scales"),
    main_argument="x",
)
def quantize_groups(
    x: Any,
    *,
    group_size: int = 128,
    scale_format: str = "float32",
    scale_layout: str = "row",
    out: Any = None,
    out_scales: Any = None,
) -> dict[str, Any]:
    """Values as E4M3 codes, each `group_size` of a token's with a descale of their own.

    The descale is `max(amax, 1e-10) / 448`, float32, of the largest magnitude of the group's finite
    values; `"ue8m0"` rounds it up to a power of two. A code is that of the float32 quotient
    `x / descale` (not of a product with a reciprocal), to nearest even, saturating at 448. A reader
    takes `code * descale`. An infinity saturates and a NaN becomes 0x7F; neither changes the scale,
    or the codes of other values. x does not change.

    Args:
        x: `[T, W]`, float32, float16 or bfloat16; rows may be strided; W is a multiple of
            `group_size`.
        group_size: a multiple of 8, 1024 at most.
        scale_format: `"float32"`, or `"ue8m0"` for powers of two, which are float32 all the same:
            their upper 9 bits are the exponent, biased by 127, as E8M0 has it.
        scale_layout: how `out_scales` lies if it is allocated here: `"row"` is contiguous; in
            `"column"` the scales of a group of columns are side by side, strides `(1, T')` in
            elements, where T' is T up to a multiple of 4 (16 bytes, as TMA wants it), and what is
            beyond T is not written. JAX arrays have no strides: their layout is JAX's own.
        out: uint8 `[T, W]`; rows may be strided; shares no memory with x. None allocates.
        out_scales: float32 `[T, W / group_size]`, any positive strides, whatever `scale_layout`
            says; shares no memory with x or `out`. None allocates.

    Returns:
        `(out, out_scales)`.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, dtype, rank, shape or name, or an
            output shares memory with another array; nothing has been launched.
    """
    require.rows(x, "x", "W")
    tokens, width = x.shape
    size = require.integer(group_size, "group_size", least=GROUP_STEP)
    if size % GROUP_STEP or size > LARGEST_GROUP:
        raise ValueError(
            f"group_size is {size}, expected a multiple of {GROUP_STEP}, {LARGEST_GROUP} at most"
        )
    _check_multiple(x, size, "a group")
    require.one_of(scale_format, "scale_format", ("float32", "ue8m0"))
    require.one_of(scale_layout, "scale_layout", ("row", "column"))
    _check_outputs({"out": out, "out_scales": out_scales}, {"x": x})
    multiple = SCALE_ALIGNMENT // FLOAT32.itemsize if scale_layout == "column" else 0
    scales = Output((tokens, width // size), FLOAT32, True, multiple)
    return {"group_size": size, "out": Output((tokens, width), CODES), "out_scales": scales}


@operation(
    reference=reference.quantize_nvfp4,
    make_inputs=cases.nvfp4_inputs,
    cases=cases.nvfp4_cases,
    workload_case=cases.nvfp4_workload,
    cost=cases.nvfp4_cost,
    tolerance=cases.tolerance,
    check_values=_check_values,
    returns=("out", "out_scales"),
    main_argument="x",
)
def quantize_nvfp4(
    x: Any, global_scale: Any, *, out: Any = None, out_scales: Any = None
) -> dict[str, Any]:
    """Values as E2M1 codes of 4 bits, each 16 with an E4M3 scale, and one float32 scale for all.

    A reader takes `code * (block_scale * global_scale)`. The block scale is the E4M3 code of
    `amax / 6 / global_scale`, two float32 quotients, of the largest magnitude of the 16 values that
    are finite: to nearest even, saturating at 448. An E2M1 code (0, 0.5, 1, 1.5, 2, 3, 4, 6 and a
    sign) is that of the float32 quotient `x / (block_scale * global_scale)`, to nearest, ties to
    the even code, saturating at 6. A NaN, which E2M1 has not, becomes code 0; an infinity
    saturates; neither changes the scale or other codes. Where the block scale rounds to 0 all codes
    are 0. x does not change.

    Args:
        x: `[T, W]`, float32, float16 or bfloat16; rows may be strided; W is a multiple of 16.
        global_scale: a descale, positive: a number, or a float32 array of one element, which may
            change between replays of a graph. `amax / (6 * 448)` of all of x spends the whole
            range; kernels that multiply by a scale want its reciprocal.
        out: uint8 `[T, W / 2]`, the first of two codes in the low bits; rows may be strided; shares
            no memory with the inputs. None allocates.
        out_scales: uint8 `[T, W / 16]`, E4M3, token by token in the order of the blocks (not in the
            tiles of 128 x 4 that tensor cores read); rows may be strided; shares no memory with the
            inputs or `out`. None allocates.

    Returns:
        `(out, out_scales)`.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, dtype, rank or shape, an output
            shares memory with another array, or (where values are checked) `global_scale` is not
            positive, normal and finite; nothing has been launched.
    """
    require.rows(x, "x", "W")
    tokens, width = x.shape
    _check_multiple(x, reference.BLOCK, "a block")
    scale = cache_arguments.scale(global_scale, "global_scale", x)
    outputs = {"out": out, "out_scales": out_scales}
    _check_outputs(outputs, {"x": x, "global_scale": scale})
    return {
        "global_scale": scale,
        "out": Output((tokens, width // 2), CODES),
        "out_scales": Output((tokens, width // reference.BLOCK), CODES),
    }
