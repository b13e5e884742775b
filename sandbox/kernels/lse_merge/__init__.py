"""Partial attention states to one: two of them, or any number stacked."""

from __future__ import annotations

from typing import Any

import numpy as np

from sandbox.kernels import cache_arguments, require
from sandbox.kernels.lse import LAYOUTS, check_conventions, lse_shape
from sandbox.kernels.lse_merge import cases, cases_k, reference
from sandbox.kernels.op import Output, operation

CODES = np.dtype(np.uint8)


def _check_state(value: Any, name: str, *axes: str) -> None:
    require.array(value, name, *axes)
    require.dtype(value, name, *require.FLOATS)
    require.strided_rows(value, name)
    if value.shape[-1] == 0:
        raise ValueError(f"{name} has shape {tuple(value.shape)}: V must be positive")


def _check_lse(value: Any, name: str, shape: tuple[int, ...], layout: str) -> None:
    require.array(value, name, *["states"][: len(shape) - 2], *LAYOUTS[layout])
    require.dtype(value, name, np.float32)
    require.whole_strides(value, name)
    if tuple(value.shape) != shape:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}, expected {shape} for lse_layout {layout!r}"
        )


def _check_outputs(
    outputs: dict[str, Any], lse_layout: str, inputs: dict[str, Any], in_place: bool
) -> None:
    """Rank and strides of the outputs that the caller gave, and whose memory they are.

    In place an output may be an input of its dtype, an LSE an LSE and a state a state.
    """
    axes = {"out": ("tokens", "heads", "V"), "out_lse": LAYOUTS[lse_layout]}

    def or_same(output: require.Memory, other: require.Memory) -> bool:
        alike = output.name.endswith("_lse") == other.name.endswith("_lse")
        return in_place and alike and output.array.dtype == other.array.dtype

    require.outputs(outputs, axes, inputs, or_same)


def _scale(output_scale: Any, like: Any) -> Any:
    if output_scale is None:
        return None
    return cache_arguments.scale(output_scale, "output_scale", like)


def _check_values(output_scale: Any, **others: Any) -> None:
    cache_arguments.positive_scales(output_scale=output_scale)


def _outputs(
    shape: tuple[int, ...], dtype: np.dtype, return_lse: bool, layout: str
) -> dict[str, Output]:
    out = {"out": Output(shape, dtype)}
    if return_lse:
        lse = Output(lse_shape(shape, layout), np.dtype(np.float32), any_strides=True)
        out["out_lse"] = lse
    return out


@operation(
    reference=reference.lse_merge,
    make_inputs=cases.make_inputs,
    cases=cases.cases,
    workload_case=cases.workload_case,
    cost=cases.cost,
    tolerance=cases.tolerance,
    check_values=_check_values,
    returns=("out", "out_lse"),
    main_argument="prefix",
)
def lse_merge(
    prefix: Any,
    prefix_lse: Any,
    suffix: Any,
    suffix_lse: Any,
    *,
    out: Any = None,
    out_lse: Any = None,
    return_lse: bool = True,
    lse_base: str = "e",
    lse_layout: str = "NT",
    output_scale: Any = None,
    context_tokens: int | None = None,
) -> dict[str, Any]:
    """Merge the attention of the same queries over two disjoint sets of keys.

    Per token and head, with `w = base ** lse` of each state, `out` is the mean of `prefix` and
    `suffix` weighted by `w`, and `out_lse = log(w_prefix + w_suffix)` in the same base; float32
    inside, each result rounded once.

    An LSE of -inf or +inf says that its state is empty (no key): the other state comes back bit
    for bit (a NaN stays a NaN), whatever the empty one holds. Two empty states give exactly 0 and
    -inf. A NaN LSE is never taken for empty: `out` and `out_lse` of that row are NaN. A NaN in a
    state that is not empty is a NaN in `out`, however little the state weighs.

    With `output_scale` the results are E4M3 codes: of the float32 mean, or of the one state that is
    not empty, times `1 / output_scale`, a float32 reciprocal and a float32 product. To nearest
    even, saturating; a NaN is code 0x7F, two empty states are code 0.

    Args:
        prefix, suffix: `[T, N, V]`, float32, float16 or bfloat16, both alike; tokens and heads
            may be strided, each its own way, the last axis is contiguous.
        prefix_lse, suffix_lse: float32, `[N, T]` or `[T, N]` by `lse_layout`, any strides.
        out: like `prefix`, or uint8 with `output_scale`; strides of its own; may be `prefix` or
            `suffix` itself, if not codes. None allocates.
        out_lse: like `prefix_lse`, any strides; may be `prefix_lse` or `suffix_lse` itself.
        return_lse: False neither computes nor returns `out_lse`.
        lse_base: `"e"` or `"2"`, of every LSE in and out.
        lse_layout: `"NT"` or `"TN"`, of every LSE in and out.
        output_scale: descale of the codes (a reader takes code * output_scale), positive: a number,
            or a float32 array of one element, which may change between replays of a graph.
        context_tokens: tokens from this one on have no context: their prefix counts as empty, and
            neither `prefix` nor `prefix_lse` is read there. An integer of 0 to T; None is T.

    Returns:
        `(out, out_lse)`, or `out` alone with `return_lse=False`.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, dtype, rank or shape, an output
            shares memory with an array that it is not, or (where values are checked)
            `output_scale` is not positive and finite; nothing has been launched.
    """
    check_conventions(return_lse, out_lse, lse_base, lse_layout)
    _check_state(prefix, "prefix", "tokens", "heads", "V")
    _check_state(suffix, "suffix", "tokens", "heads", "V")
    require.same_dtype(suffix, "suffix", prefix, "prefix")
    shape = tuple(prefix.shape)
    if tuple(suffix.shape) != shape:
        raise ValueError(f"suffix has shape {tuple(suffix.shape)}, expected {shape} as prefix")
    _check_lse(prefix_lse, "prefix_lse", lse_shape(shape, lse_layout), lse_layout)
    _check_lse(suffix_lse, "suffix_lse", lse_shape(shape, lse_layout), lse_layout)
    scale = _scale(output_scale, prefix)
    inputs = {
        "prefix": prefix,
        "prefix_lse": prefix_lse,
        "suffix": suffix,
        "suffix_lse": suffix_lse,
        "output_scale": scale,
    }
    _check_outputs({"out": out, "out_lse": out_lse}, lse_layout, inputs, in_place=True)
    dtype = prefix.dtype if scale is None else CODES
    return {
        **_outputs(shape, dtype, return_lse, lse_layout),
        "output_scale": scale,
        "context_tokens": _context_tokens(context_tokens, shape[0]),
    }


def _context_tokens(asked: Any, tokens: int) -> int:
    if asked is None:
        return tokens
    found = require.integer(asked, "context_tokens")
    if found > tokens:
        raise ValueError(f"context_tokens is {found}, expected at most T = {tokens}")
    return found


@operation(
    reference=reference.lse_merge_k,
    make_inputs=cases_k.make_inputs,
    cases=cases_k.cases,
    workload_case=cases_k.workload_case,
    cost=cases_k.cost,
    tolerance=cases_k.tolerance,
    check_values=_check_values,
    returns=("out", "out_lse"),
    main_argument="partials",
)
def lse_merge_k(
    partials: Any,
    lses: Any,
    *,
    out: Any = None,
    out_lse: Any = None,
    out_dtype: Any = None,
    return_lse: bool = True,
    lse_base: str = "e",
    lse_layout: str = "NT",
    output_scale: Any = None,
) -> dict[str, Any]:
    """Merge the attention of the same queries over `K` disjoint sets of keys, such as KV splits.

    One softmax over the `K` LSEs of a token and head weighs its `K` partials; float32 inside, each
    result rounded once, so that nothing depends on an order of pairwise merges.

    An LSE of -inf or +inf says that its state is empty: whatever it holds counts for nothing. A
    single state that is not empty comes back bit for bit (a NaN stays a NaN), rounded if `out` is
    narrower. No state at all gives exactly 0 and -inf. A NaN LSE makes `out` and `out_lse` of its
    row NaN; a NaN in a state that is not empty is a NaN in `out`.

    With `output_scale` the results are E4M3 codes, as those of `lse_merge`.

    Args:
        partials: `[K, T, N, V]`, float32, float16 or bfloat16; all axes but the last may be
            strided. Any `K >= 1`.
        lses: float32, `[K, N, T]` or `[K, T, N]` by `lse_layout`, any strides.
        out: `[T, N, V]`, uint8 with `output_scale`; tokens and heads may be strided; shares no
            memory with the inputs. None allocates.
        out_lse: float32, `[N, T]` or `[T, N]`, any strides; shares no memory with the inputs.
        out_dtype: float32, float16 or bfloat16 (a NumPy dtype or its name); None is `out`'s, or
            else that of `partials`; not with `output_scale`.
        return_lse: False neither computes nor returns `out_lse`.
        lse_base: `"e"` or `"2"`, of every LSE in and out.
        lse_layout: `"NT"` or `"TN"`, of every LSE in and out.
        output_scale: descale of the codes, as for `lse_merge`.

    Returns:
        `(out, out_lse)`, or `out` alone with `return_lse=False`.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, dtype, rank or shape, an output
            shares memory with another array, or (where values are checked) `output_scale` is not
            positive and finite; nothing has been launched.
    """
    check_conventions(return_lse, out_lse, lse_base, lse_layout)
    _check_state(partials, "partials", "states", "tokens", "heads", "V")
    if partials.shape[0] == 0:
        raise ValueError(f"partials has shape {tuple(partials.shape)}: K must be at least 1")
    shape = tuple(partials.shape[1:])
    _check_lse(lses, "lses", (partials.shape[0], *lse_shape(shape, lse_layout)), lse_layout)
    scale = _scale(output_scale, partials)
    inputs = {"partials": partials, "lses": lses, "output_scale": scale}
    _check_outputs({"out": out, "out_lse": out_lse}, lse_layout, inputs, in_place=False)
    dtype = _out_dtype(out_dtype, out, partials, scale)
    return {**_outputs(shape, dtype, return_lse, lse_layout), "output_scale": scale}


def _out_dtype(asked: Any, out: Any, partials: Any, scale: Any) -> np.dtype:
    if scale is not None:
        if asked is not None:
            raise ValueError(f"out_dtype is {asked!r}, but output_scale makes out uint8 codes")
        return CODES
    if asked is None:
        if out is None:
            return partials.dtype
        require.dtype(out, "out", *require.FLOATS)
        return out.dtype
    return require.named_dtype(asked, "out_dtype", require.FLOATS)
