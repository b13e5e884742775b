"""Problems for linear: the projections of a layer, how they lie in memory, what they must cost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from sandbox.dims import PRESETS, MLADims
from sandbox.kernels import case as c
from sandbox.kernels.case import Case, Workload
from sandbox.kernels.op import Cost, Tolerance

tokens = Workload.of_tokens
ODD = MLADims(3, 57, 43, 25, 6, 17, q_lora_rank=21)
"""No width is a multiple of 2."""


def widths(case: Case) -> tuple[int, int]:
    """`I` and `O` of the projection that the option `of` names (default `o_proj`)."""
    dims, name = case.dims, case.options.get("of", "o_proj")
    q_in = dims.q_lora_rank or dims.H
    return {
        "q_a_proj": (dims.H, q_in),
        "q_b_proj": (q_in, dims.N * dims.qk_head_dim),
        "kv_a_proj": (dims.H, dims.E),
        "kv_b_proj": (dims.L, dims.N * (dims.P + dims.V)),
        "o_proj": (dims.N * dims.V, dims.H),
    }[name]


def make_inputs(case: Case, xp: Any) -> dict[str, Any]:
    """Rows of normal numbers, weights scaled by `I ** -0.5`.

    Options: `of`; `bias`; `views` (columns of wider arrays, whose rest is NaN); `spoiled` (a NaN
    and an infinity in rows of x).
    """
    options, tokens = case.options, case.workload.query_tokens
    width, outputs = widths(case)
    pad = 16 if options.get("views") else 0
    x = c.unwritten(xp, (tokens, width + pad), case.dtype)[:, pad // 2 : pad // 2 + width]
    x[...] = c.normal(xp, (tokens, width), case.dtype, case.seed)
    if options.get("spoiled"):
        x[1, 3], x[2, 5] = np.nan, np.inf
    weight = c.unwritten(xp, (outputs, width + pad), case.dtype)[:, :width]
    scaled = c.normal(xp, (outputs, width), np.dtype(np.float32), case.seed + 1)
    weight[...] = (scaled * np.float32(width**-0.5)).astype(case.dtype)
    inputs = {"x": x, "weight": weight}
    if options.get("bias"):
        inputs["bias"] = c.normal(xp, (outputs,), case.dtype, case.seed + 2)
    if options.get("views"):
        inputs["out"] = c.unwritten(xp, (tokens, outputs + pad), case.dtype)[:, :outputs]
    return inputs


def cases(purpose: str) -> Iterable[Case]:
    return _conformance() if purpose == "conformance" else _compare()


def _conformance() -> Iterable[Case]:
    tiny, v3 = PRESETS["tiny"], PRESETS["deepseek_v3"]
    bf16 = c.dtypes("bfloat16")[0]
    for dtype in c.dtypes("float32", "float16", "bfloat16"):
        yield Case(tiny, "tiny", dtype, tokens(1), {"of": "q_b_proj"})
        yield Case(tiny, "tiny", dtype, tokens(3), {"of": "o_proj", "views": True, "bias": True})
        yield Case(ODD, "odd", dtype, tokens(2), {"of": "q_a_proj", "bias": True})
    for count in (0, 2, 4, 5):
        yield Case(tiny, "tiny", bf16, tokens(count), {"of": "kv_a_proj"})
    yield Case(tiny, "tiny", bf16, tokens(4), {"of": "kv_a_proj", "spoiled": True})
    for count in (1, 3):
        yield Case(
            v3, "deepseek_v3", bf16, tokens(count), {"of": "kv_a_proj", "bias": True}, "large"
        )


def _compare() -> Iterable[Case]:
    for dtype in c.dtypes("float32", "float16", "bfloat16"):
        yield Case(PRESETS["tiny"], "tiny", dtype, tokens(4))
    bf16 = c.dtypes("bfloat16")[0]
    for name in ("q_a_proj", "q_b_proj", "kv_a_proj", "o_proj"):
        for count in (1, 2, 4, 128):
            workload = tokens(count)
            yield Case(PRESETS["deepseek_v3"], "deepseek_v3", bf16, workload, {"of": name}, "large")


def workload_case(
    dims: MLADims, dims_name: str, dtype: np.dtype, workload: Workload, size: str
) -> Case | None:
    """The output projection of a batch's new tokens."""
    return Case(dims, dims_name, dtype, workload, {}, size) if workload.query_tokens else None


def cost(case: Case) -> Cost:
    """Rows, weight and bias once in, the result once out."""
    (width, outputs), item = widths(case), case.dtype.itemsize
    tokens = case.workload.query_tokens
    read = tokens * width + outputs * width + (outputs if case.options.get("bias") else 0)
    return Cost(
        bytes_read=read * item,
        bytes_written=tokens * outputs * item,
        flops=2 * tokens * outputs * width,
    )


def tolerance(case: Case) -> dict[str, Tolerance]:
    """A rounding to 16 bits, or the float32 sum of many products."""
    return {"out": Tolerance(ulps=16 if case.dtype.itemsize == 4 else 1.0, by_row=True)}
