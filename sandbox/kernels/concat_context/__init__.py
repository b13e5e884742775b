"""Whole keys, and values, of a context projected from the cache, for attention over heads."""

from __future__ import annotations

from typing import Any

import numpy as np

from sandbox.kernels import cache_arguments, require
from sandbox.kernels.concat_context import cases, reference
from sandbox.kernels.concat_insert.checks import apart, output_rows
from sandbox.kernels.op import Output, operation


def _check_values(k_descale: Any = None, v_descale: Any = None, **_: Any) -> None:
    cache_arguments.positive_scales(k_descale=k_descale, v_descale=v_descale)


def _check_heads(value: Any, name: str, width: str) -> None:
    require.array(value, name, "tokens", "N", width)
    require.strided_rows(value, name)
    if value.shape[1] == 0 or value.shape[2] == 0:
        raise ValueError(f"{name} has shape {tuple(value.shape)}: N and {width} must be positive")


def _check_keys(k_nope: Any, k_pe: Any) -> Any:
    """Check the parts of the keys; returns `k_pe` as `[T, R]` whatever form it came in."""
    _check_heads(k_nope, "k_nope", "P")
    require.dtype(k_nope, "k_nope", *require.FLOATS)
    k_pe = k_nope[:, 0, :0] if k_pe is None else k_pe
    if getattr(k_pe, "ndim", 2) == 3:
        require.array(k_pe, "k_pe", "tokens", "1", "R")
        require.size(k_pe, "k_pe", 1, 1, "all heads share one rotated key")
        k_pe = k_pe[:, 0]
    require.array(k_pe, "k_pe", "tokens", "R")
    if k_pe.dtype == np.uint8:
        raise TypeError(
            "k_pe is uint8: a cache's codes are value / k_scale and no values; restore them first, "
            f"to {k_nope.dtype}, with dequantize_context"
        )
    require.same_dtype(k_pe, "k_pe", k_nope, "k_nope")
    require.strided_rows(k_pe, "k_pe")
    require.size(k_pe, "k_pe", 0, k_nope.shape[0], "k_nope's tokens")
    return k_pe


def _output(value: Any, name: str, like: Any, width: int, dtype: np.dtype) -> Output:
    return Output((output_rows(value, name, like.shape[0]), like.shape[1], width), dtype)


@operation(
    reference=reference.concat_context,
    make_inputs=cases.inputs,
    cases=cases.cases,
    workload_case=cases.workload_case,
    cost=cases.cost,
    tolerance=cases.tolerance,
    returns=("k_out",),
    main_argument="k_nope",
)
def concat_context(k_nope: Any, k_pe: Any, *, k_out: Any = None) -> dict[str, Any]:
    """Whole keys `[k_nope | k_pe]` for every head, bit for bit, with the same `k_pe` for each.

    Nothing is rotated: the keys of a context were rotated when they went into the cache. No input
    changes.

    Args:
        k_nope: `[T, N, P]`, float32, float16 or bfloat16, strided in token and head (a half of
            kv_b_proj's output).
        k_pe: `[T, R]` or `[T, 1, R]` of k_nope's dtype; rows may be strided (columns of a gathered
            workspace). None is R = 0.
        k_out: `[>= T, N, P + R]`, strided in token and head; shares no memory with the inputs. None
            allocates `[T, N, P + R]`.

    Returns:
        `k_out`. Rows from T on, of an array that the caller gave, are left as they are.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, dtype, rank or size, `k_pe` holds a
            cache's codes, or an output shares memory with another argument; nothing has been
            written.
    """
    k_pe = _check_keys(k_nope, k_pe)
    k_out_spec = _output(k_out, "k_out", k_nope, k_nope.shape[2] + k_pe.shape[1], k_nope.dtype)
    apart({"k_out": k_out}, {"k_nope": k_nope, "k_pe": k_pe})
    return {"k_pe": k_pe, "k_out": k_out_spec}


@operation(
    reference=reference.concat_context_fp8,
    make_inputs=cases.fp8_inputs,
    cases=cases.cases,
    workload_case=cases.workload_case,
    cost=cases.fp8_cost,
    tolerance=cases.fp8_tolerance,
    check_values=_check_values,
    returns=("k_out", "v_out"),
    main_argument="k_nope",
)
def concat_context_fp8(
    k_nope: Any,
    k_pe: Any,
    v: Any,
    *,
    k_descale: Any,
    v_descale: Any,
    k_out: Any = None,
    v_out: Any = None,
) -> dict[str, Any]:
    """Whole keys `[k_nope | k_pe]` and values of a context as E4M3 codes.

    For an attention that reads `code * descale`. A code is that of `value * (1 / descale)`, a
    float32 reciprocal and a float32 product, rounded to nearest even and saturating; a NaN becomes
    0x7F. No input changes.

    Args:
        k_nope, k_pe: as for `concat_context`.
        v: `[T, N, V]` of k_nope's dtype, strided in token and head (the other half of kv_b_proj's
            output).
        k_descale, v_descale: numbers, or float32 arrays of one element, which may change between
            replays of a graph.
        k_out: uint8 `[>= T, N, P + R]`; None allocates `[T, N, P + R]`.
        v_out: uint8 `[>= T, N, V]`; None allocates `[T, N, V]`.

    Returns:
        `(k_out, v_out)`. Rows from T on, of arrays that the caller gave, are left as they are.

    Raises:
        TypeError, ValueError: as for `concat_context`, or a descale is missing or (where values are
            checked) not positive and finite.
    """
    k_pe = _check_keys(k_nope, k_pe)
    _check_heads(v, "v", "V")
    require.same_dtype(v, "v", k_nope, "k_nope")
    require.size(v, "v", 0, k_nope.shape[0], "k_nope's tokens")
    require.size(v, "v", 1, k_nope.shape[1], "k_nope's heads")
    descales = {
        "k_descale": cache_arguments.scale(k_descale, "k_descale", k_nope),
        "v_descale": cache_arguments.scale(v_descale, "v_descale", k_nope),
    }
    codes, width = np.dtype(np.uint8), k_nope.shape[2] + k_pe.shape[1]
    outputs = {
        "k_out": _output(k_out, "k_out", k_nope, width, codes),
        "v_out": _output(v_out, "v_out", k_nope, v.shape[2], codes),
    }
    inputs = {"k_nope": k_nope, "k_pe": k_pe, "v": v, **descales}
    apart({"k_out": k_out, "v_out": v_out}, inputs)
    return {"k_pe": k_pe, **descales, **outputs}
