"""Problems for sigmoid_gate: what the arrays hold, how they lie in memory, what it must cost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from sandbox.dims import PRESETS, MLADims
from sandbox.kernels import case as c
from sandbox.kernels.case import Case, Workload
from sandbox.kernels.op import Cost, Tolerance

tokens = Workload.of_tokens
ODD = MLADims(3, 56, 40, 24, 8, 17)
"""Rows of 51 elements: accesses of one element."""

ZEROS = (0.0, -0.0)
GATES = (np.nan, -np.nan, np.inf, -np.inf, 6e4, -6e4, 0.0)


def width(case: Case) -> int:
    return case.dims.N * case.dims.V


def make_inputs(case: Case, xp: Any) -> dict[str, Any]:
    """Attention of a few and gates of either sign.

    Options: `hostile` (zeros behind every kind of gate, NaN, infinities, large gates); `strided`
    (each array with padding of its own between rows, NaN there); `in_place` ("x" or "gate").
    """
    options, shape = case.options, (case.workload.query_tokens, width(case))
    x = c.normal(xp, shape, case.dtype, case.seed)
    gate = (3 * c.normal(xp, shape, np.dtype(np.float32), case.seed + 1)).astype(case.dtype)
    if options.get("hostile"):
        _spoil(xp, x, gate)
    inputs: dict[str, Any] = {}
    if options.get("strided"):
        x, gate = _between(xp, x, 0, 8), _between(xp, gate, 16, 24)
        inputs["out"] = _between(xp, c.unwritten(xp, shape, case.dtype), 0, 16)
    inputs |= {"x": x, "gate": gate}
    if side := options.get("in_place"):
        inputs["out"] = inputs[side]
    return inputs


def _spoil(xp: Any, x: Any, gate: Any) -> None:
    """Two rows of zeros behind gates of every kind, and one of other values behind them."""
    gates = xp.asarray(np.resize(np.array(GATES, np.float32), x.shape[1])).astype(gate.dtype)
    for row, zero in enumerate(ZEROS, 1):
        x[row], gate[row] = zero, gates
    gate[3] = gates
    x[4, :3] = xp.asarray(np.array([np.nan, np.inf, -np.inf], np.float32)).astype(x.dtype)


def _between(xp: Any, rows: Any, before: int, after: int) -> Any:
    """The rows as columns of wider ones, NaN around them."""
    wide = c.unwritten(xp, (rows.shape[0], before + rows.shape[1] + after), rows.dtype)
    view = wide[:, before : before + rows.shape[1]]
    view[...] = rows
    return view


def cases(purpose: str) -> Iterable[Case]:
    return _conformance() if purpose == "conformance" else _compare()


def _conformance() -> Iterable[Case]:
    tiny, v3 = PRESETS["tiny"], PRESETS["deepseek_v3"]
    fp32, bf16 = c.dtypes("float32", "bfloat16")
    for dtype in c.dtypes("float32", "float16", "bfloat16"):
        yield Case(tiny, "tiny", dtype, tokens(6), {"hostile": True, "strided": True})
    for dtype in (fp32, bf16):
        yield Case(ODD, "odd", dtype, tokens(5), {"hostile": True})
    for side in ("x", "gate"):
        yield Case(tiny, "tiny", bf16, tokens(5), {"hostile": True, "in_place": side})
    yield Case(tiny, "tiny", bf16, tokens(3), {"in_place": "x", "strided": True})
    for count in (0, 1):
        yield Case(tiny, "tiny", bf16, tokens(count))
    yield Case(v3, "deepseek_v3", bf16, tokens(5), {"hostile": True}, "medium")
    yield Case(v3, "deepseek_v3", fp32, tokens(5), {"strided": True}, "medium")


def _compare() -> Iterable[Case]:
    for name, count in (("tiny", 9), ("kimi_linear", 5)):
        for dtype in c.dtypes("float32", "float16", "bfloat16"):
            size = "small" if name == "tiny" else "medium"
            yield Case(PRESETS[name], name, dtype, tokens(count), size=size)
    bf16 = c.dtypes("bfloat16")[0]
    for count in (1, 128, 8192):
        size = "medium" if count <= 128 else "large"
        yield Case(PRESETS["deepseek_v3"], "deepseek_v3", bf16, tokens(count), size=size)


def workload_case(
    dims: MLADims, dims_name: str, dtype: np.dtype, workload: Workload, size: str
) -> Case | None:
    """The attention of a batch's new tokens."""
    return Case(dims, dims_name, dtype, workload, {}, size) if workload.query_tokens else None


def cost(case: Case) -> Cost:
    """Both once in, the product once out; negation, exp, sum, quotient and product are FLOPs."""
    elements = case.workload.query_tokens * width(case)
    return Cost(
        bytes_read=2 * elements * case.dtype.itemsize,
        bytes_written=elements * case.dtype.itemsize,
        flops=5 * elements,
    )


def tolerance(case: Case) -> dict[str, Tolerance]:
    """Half an ulp for the one rounding to 16 bits, and a few float32 ulps of exp and quotient."""
    return {"out": Tolerance(ulps=4 if case.dtype.itemsize == 4 else 0.51, by_row=True)}
