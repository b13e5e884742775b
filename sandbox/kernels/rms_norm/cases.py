"""Problems for rms_norm: what the arrays hold, how they lie in memory, what it must cost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from sandbox.dims import PRESETS, MLADims
from sandbox.kernels import case as c
from sandbox.kernels.case import Case, Workload
from sandbox.kernels.op import Cost, Tolerance

tokens = Workload.of_tokens
ODD = MLADims(3, 56, 43, 25, 6, 17, q_lora_rank=21)
"""Rows of 43 elements at an odd place in rows of 70: accesses of one element."""


def place(case: Case) -> tuple[int, int, int]:
    """Columns of the array that x is taken from: all of them, x's first, and how many are x's.

    The option `of` names what is normalised: `kv_c` (default) or `q_c` of the fused projection
    `[q_c | kv_c | k_pe]`, or the layer's `hidden` states. Without Lq there is no q_c but kv_c.
    """
    dims, q_width = case.dims, case.dims.q_lora_rank or 0
    fused, part = q_width + dims.L + dims.R, case.options.get("of", "kv_c")
    if part == "hidden":
        return dims.H, 0, dims.H
    return (fused, 0, q_width) if part == "q_c" and q_width else (fused, q_width, dims.L)


def make_inputs(case: Case, xp: Any) -> dict[str, Any]:
    """Rows of different sizes, as columns of rows whose rest is NaN.

    Options: `of`; `eps`; `hostile` (rows of zeros, with a NaN, with an infinity, too large and very
    small); `strided` (an output with padding between rows); `in_place`.
    """
    options, tokens = case.options, case.workload.query_tokens
    columns, first, width = place(case)
    x = c.unwritten(xp, (tokens, columns), case.dtype)[:, first : first + width]
    values = c.normal(xp, (tokens, width), np.dtype(np.float32), case.seed)
    sizes = 2.0 ** (xp.arange(tokens) % 7 - 3)
    x[...] = (values * sizes[:, None]).astype(case.dtype)
    if options.get("hostile"):
        _spoil(xp, x)
    weight = 1 + 0.5 * c.normal(xp, (width,), np.dtype(np.float32), case.seed + 1)
    inputs = {"x": x, "weight": weight.astype(case.dtype)}
    if "eps" in options:
        inputs["eps"] = options["eps"]
    if options.get("in_place"):
        inputs["out"] = x
    elif options.get("strided"):
        inputs["out"] = c.unwritten(xp, (tokens, width + 16), case.dtype)[:, :width]
    return inputs


def _spoil(xp: Any, x: Any) -> None:
    largest = {"float16": 65504.0}.get(x.dtype.name, 3e38)
    x[1] = 0
    x[2, 3] = np.nan
    x[3, 4] = -np.inf
    x[4] = (xp.sign(x[4].astype(np.float32)) * largest).astype(x.dtype)
    x[5] = (x[5].astype(np.float32) * 1e-3).astype(x.dtype)


def cases(purpose: str) -> Iterable[Case]:
    return _conformance() if purpose == "conformance" else _compare()


def _conformance() -> Iterable[Case]:
    tiny, v3 = PRESETS["tiny"], PRESETS["deepseek_v3"]
    fp32, bf16 = c.dtypes("float32", "bfloat16")
    for dtype in c.dtypes("float32", "float16", "bfloat16"):
        options = {"of": "q_c", "hostile": True, "strided": True}
        yield Case(tiny, "tiny", dtype, tokens(7), options)
    for dtype in (fp32, bf16):
        yield Case(ODD, "odd", dtype, tokens(6), {"hostile": True})
    yield Case(tiny, "tiny", bf16, tokens(5), {"of": "q_c", "in_place": True, "eps": 0.5})
    yield Case(tiny, "tiny", bf16, tokens(3), {"of": "q_c", "eps": 0})
    for count in (0, 1):
        yield Case(tiny, "tiny", bf16, tokens(count), {"of": "q_c"})
    for part in ("q_c", "kv_c", "hidden"):
        yield Case(v3, "deepseek_v3", bf16, tokens(6), {"of": part, "hostile": True}, "medium")
    options = {"of": "q_c", "hostile": True, "in_place": True}
    yield Case(v3, "deepseek_v3", fp32, tokens(6), options, "medium")


def _compare() -> Iterable[Case]:
    for name, count in (("tiny", 9), ("kimi_linear", 5)):
        for dtype in c.dtypes("float32", "float16", "bfloat16"):
            size = "small" if name == "tiny" else "medium"
            yield Case(PRESETS[name], name, dtype, tokens(count), size=size)
    bf16 = c.dtypes("bfloat16")[0]
    for part in ("q_c", "kv_c"):
        for count in (1, 128, 8192):
            size = "medium" if count <= 128 else "large"
            workload = tokens(count)
            yield Case(PRESETS["deepseek_v3"], "deepseek_v3", bf16, workload, {"of": part}, size)


def workload_case(
    dims: MLADims, dims_name: str, dtype: np.dtype, workload: Workload, size: str
) -> Case | None:
    """The latents of a batch's new tokens."""
    return Case(dims, dims_name, dtype, workload, {}, size) if workload.query_tokens else None


def cost(case: Case) -> Cost:
    """Rows once in and once out, the weight once in."""
    tokens, width, item = case.workload.query_tokens, place(case)[2], case.dtype.itemsize
    return Cost(
        bytes_read=(tokens + 1) * width * item,
        bytes_written=tokens * width * item,
        flops=4 * tokens * width,
    )


def tolerance(case: Case) -> dict[str, Tolerance]:
    """Rounded to 16 bits twice, where the first may fall the other way: one and a half ulps. In
    float32 a few for the sum and the root."""
    return {"out": Tolerance(ulps=4 if case.dtype.itemsize == 4 else 1.51, by_row=True)}
