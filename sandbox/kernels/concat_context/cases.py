"""Problems for concat_context: what the arrays hold, how they lie in memory, what it must cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from sandbox.dims import PRESETS, MLADims
from sandbox.kernels import case as c
from sandbox.kernels.case import Case, Workload
from sandbox.kernels.concat_insert.cases import EDGES
from sandbox.kernels.op import Cost, Tolerance

ODD = MLADims(3, 56, 43, 25, 6, 17)
"""Heads of 25, 31 and 17 elements: accesses of one element, or of one code."""
UNEVEN = MLADims(5, 56, 40, 24, 8, 20)
"""Keys in groups of 8 and values in groups of 4."""
MANY_HEADS = replace(UNEVEN, num_heads=90)
"""More heads than a block takes at a time."""
NO_ROPE_COLUMNS = MLADims(3, 56, 40, 24, 0, 16)

K_DESCALE, V_DESCALE = 0.3, 0.0125
"""Neither a power of two; the value's saturates some codes."""

RAGGED = Workload("ragged", (3, 0, 6), (2, 2, 2))
NOBODY = Workload("nobody", (0, 0), (2, 2))
SHORT = Workload("short", (5, 0), (4, 2))


def inputs(case: Case, xp: Any) -> dict[str, Any]:
    """Keys of `context_lens` tokens.

    Options: `views` (default: parts are columns of wider arrays filled with NaN, one element off
    for odd dims; else halves of one packed projection); `spare` (rows of outputs beyond T, in rows
    with padding between).
    """
    arguments = _parts(case, xp)
    del arguments["v"]
    return arguments | _outputs(case, xp, case.dtype, {"k_out": case.dims.qk_head_dim})


def fp8_inputs(case: Case, xp: Any) -> dict[str, Any]:
    """Options as `inputs`. Small problems hold values at the edges of the codes."""
    arguments = _parts(case, xp)
    if case.size == "small" and case.workload.context_tokens:
        for name, scale in (("k_nope", K_DESCALE), ("v", V_DESCALE), ("k_pe", K_DESCALE)):
            if arguments[name] is not None:
                _put_edges(xp, arguments[name][1:], scale)
    scales = {"k_descale": K_DESCALE, "v_descale": V_DESCALE}
    arguments |= {name: xp.asarray(np.array([value], np.float32)) for name, value in scales.items()}
    widths = {"k_out": case.dims.qk_head_dim, "v_out": case.dims.V}
    return arguments | _outputs(case, xp, np.dtype(np.uint8), widths)


def _put_edges(xp: Any, rows: Any, scale: float) -> None:
    """Zeros, ties, subnormals, too large values, inf and NaN, over and over."""
    with np.errstate(over="ignore"):
        edges = (np.asarray(EDGES, np.float32) * np.float32(scale)).astype(rows.dtype)
    rows[...] = xp.asarray(np.resize(edges, rows.shape))


def _parts(case: Case, xp: Any) -> dict[str, Any]:
    dims, tokens = case.dims, case.workload.context_tokens
    shapes = {"kv": (tokens, dims.N, dims.P + dims.V), "row": (tokens, dims.E)}
    if case.options.get("views", True):
        before = 1 if dims.L % 2 else 16
        kv = c.column_slice(xp, shapes["kv"], case.dtype, case.seed, before)
        row = c.column_slice(xp, shapes["row"], case.dtype, case.seed + 1, before)
    else:
        kv = c.normal(xp, shapes["kv"], case.dtype, case.seed)
        row = c.normal(xp, shapes["row"], case.dtype, case.seed + 1)
    k_pe = row[:, dims.L :] if dims.R else None
    return {"k_nope": kv[..., : dims.P], "k_pe": k_pe, "v": kv[..., dims.P :]}


def _outputs(case: Case, xp: Any, dtype: np.dtype, widths: dict[str, int]) -> dict[str, Any]:
    spare, tokens = case.options.get("spare", 0), case.workload.context_tokens
    if not spare:
        return {}
    outputs = {}
    for name, width in widths.items():
        wide = c.unwritten(xp, (tokens + spare, case.dims.N, width + 16), dtype)
        outputs[name] = wide[..., :width]
    return outputs


def cases(purpose: str) -> Iterable[Case]:
    return _conformance() if purpose == "conformance" else _compare()


def _conformance() -> Iterable[Case]:
    tiny, bf16 = PRESETS["tiny"], c.dtypes("bfloat16")[0]
    for dtype in c.dtypes("float32", "float16", "bfloat16"):
        yield Case(tiny, "tiny", dtype, RAGGED, {"spare": 2})
    for dtype in c.dtypes("float32", "bfloat16"):
        yield Case(ODD, "odd", dtype, RAGGED)
    yield Case(UNEVEN, "uneven", bf16, RAGGED)
    yield Case(NO_ROPE_COLUMNS, "no_rope_columns", bf16, RAGGED)
    yield Case(tiny, "tiny", bf16, NOBODY)
    yield Case(MANY_HEADS, "many_heads", bf16, RAGGED, {"views": False}, "medium")
    for dtype in c.dtypes("float32", "bfloat16"):
        yield Case(PRESETS["deepseek_v3"], "deepseek_v3", dtype, SHORT, {}, "medium")


def _compare() -> Iterable[Case]:
    options = {"views": False}
    for name in ("tiny", "kimi_linear"):
        size = "small" if name == "tiny" else "medium"
        for dtype in c.dtypes("float32", "float16", "bfloat16"):
            yield Case(PRESETS[name], name, dtype, RAGGED, options, size)
    bf16, v3 = c.dtypes("bfloat16")[0], PRESETS["deepseek_v3"]
    for tokens in (2048, 8192, 32768):
        workload = Workload(f"{tokens}tokens", (tokens,), (16,))
        yield Case(v3, "deepseek_v3", bf16, workload, options, "large")


def workload_case(
    dims: MLADims, dims_name: str, dtype: np.dtype, workload: Workload, size: str
) -> Case | None:
    """The context of a batch's prefills, or None where none has context: decodes attend over the
    latent cache."""
    workload = workload.prefills()
    if not workload.context_tokens:
        return None
    return Case(dims, dims_name, dtype, workload, {"views": False}, size)


def cost(case: Case) -> Cost:
    """Each part once in, whole keys out."""
    dims, tokens, item = case.dims, case.workload.context_tokens, case.dtype.itemsize
    return Cost(
        bytes_read=tokens * (dims.N * dims.P + dims.R) * item,
        bytes_written=tokens * dims.N * dims.qk_head_dim * item,
    )


def fp8_cost(case: Case) -> Cost:
    """Keys and values, a byte a value out."""
    dims, tokens = case.dims, case.workload.context_tokens
    read = cost(case).bytes_read + tokens * dims.N * dims.V * case.dtype.itemsize
    return Cost(bytes_read=read, bytes_written=tokens * dims.N * (dims.qk_head_dim + dims.V))


def tolerance(case: Case) -> dict[str, Tolerance]:
    return {"k_out": Tolerance()}


def fp8_tolerance(case: Case) -> dict[str, Tolerance]:
    return {"k_out": Tolerance(), "v_out": Tolerance()}
