"""Problems for lse_merge_k: the combine step of a split-KV decode, and hostile small ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from sandbox import arrays
from sandbox.dims import PRESETS, MLADims
from sandbox.kernels import case as c
from sandbox.kernels.case import Case, Workload
from sandbox.kernels.lse import by_token, lse_shape
from sandbox.kernels.lse_merge.cases import (
    ODD_HEAD,
    SCALE,
    codes,
    conventions_of,
    every_second,
    heads_first,
    lse_values,
    query_tokens,
    spoil,
    tokens,
    wide_rows,
)
from sandbox.kernels.op import Cost, Tolerance


def make_inputs(case: Case, xp: Any) -> dict[str, Any]:
    """`K` partials of `case.dtype`, `kv_lora_rank` wide as an absorbed decode leaves them.

    Options: `states` (K); `out` (a dtype's name); `empty`, `nan`, `huge`, `strided`, `no_lse`,
    `base`, `layout` and `scale` as in lse_merge.
    """
    options = case.options
    states, layout = options["states"], options.get("layout", "NT")
    shape = (query_tokens(case), case.dims.N, case.dims.L)
    lses = lse_values(case, xp, states, shape)
    partials = c.normal(xp, (states, *shape), case.dtype, case.seed)
    if options.get("empty"):
        spoil(xp, partials, xp.isinf(lses))
    lses = xp.ascontiguousarray(by_token(lses, layout))
    dtype = _out_dtype(case)
    inputs = conventions_of(options, xp) | {"partials": partials, "lses": lses}
    if "out" in options:
        inputs["out_dtype"] = dtype
    if options.get("strided"):
        inputs["partials"] = wide_rows(xp, heads_first(xp, partials), 4)
        inputs["lses"] = every_second(xp, lses)
        inputs["out"] = heads_first(xp, c.unwritten(xp, shape, dtype))
        inputs["out_lse"] = every_second(xp, c.unwritten(xp, lse_shape(shape, layout), np.float32))
    return inputs


def _out_dtype(case: Case) -> np.dtype:
    if "scale" in case.options:
        return arrays.DTYPES["uint8"]
    return arrays.DTYPES[case.options.get("out", case.dtype.name)]


def cases(purpose: str) -> Iterable[Case]:
    if purpose == "conformance":
        yield from _conformance()
    else:
        yield from _compare()


def _conformance() -> Iterable[Case]:
    tiny, v3 = PRESETS["tiny"], PRESETS["deepseek_v3"]
    fp32, bf16 = c.dtypes("float32", "bfloat16")
    for dtype in c.dtypes("float32", "float16", "bfloat16"):
        options = {"states": 5, "empty": True, "strided": True, "out": "bfloat16"}
        yield Case(tiny, "tiny", dtype, tokens(3), options)
    options = {"states": 3, "empty": True, "base": "2", "layout": "TN"}
    yield Case(ODD_HEAD, "odd_head", bf16, tokens(4), options)
    yield Case(ODD_HEAD, "odd_head", fp32, tokens(2), {"states": 67, "empty": True, "huge": True})
    yield Case(tiny, "tiny", fp32, tokens(3), {"states": 2, "no_lse": True, "out": "float16"})
    yield Case(tiny, "tiny", fp32, tokens(5), {"states": 4, "empty": True, "nan": True})
    yield Case(tiny, "tiny", fp32, tokens(5), {"states": 1, "empty": True})
    for count in (0, 1):
        yield Case(tiny, "tiny", fp32, tokens(count), {"states": 4})
    options = {"states": 3, "scale": SCALE, "empty": True, "nan": True, "strided": True}
    yield Case(tiny, "tiny", fp32, tokens(5), options)
    yield Case(ODD_HEAD, "odd_head", bf16, tokens(2), {"states": 2, "scale": SCALE})
    options = {"states": 6, "empty": True, "scale": SCALE}
    yield Case(v3, "deepseek_v3", fp32, tokens(2), options, "medium")
    options = {"states": 6, "empty": True, "out": "bfloat16"}
    yield Case(v3, "deepseek_v3", fp32, tokens(2), options, "medium")
    yield Case(v3, "deepseek_v3", fp32, tokens(2), options | {"strided": True}, "medium")
    options = {"states": 40, "empty": True, "huge": True, "layout": "TN"}
    yield Case(v3, "deepseek_v3", bf16, tokens(1), options, "medium")


def _compare() -> Iterable[Case]:
    fp32, bf16 = c.dtypes("float32", "bfloat16")
    for dtype in (fp32, bf16):
        yield Case(PRESETS["tiny"], "tiny", dtype, tokens(5), {"states": 4, "out": "bfloat16"})
    v3 = PRESETS["deepseek_v3"]
    for states, count in ((66, 1), (8, 4), (4, 16), (4, 128), (8, 128)):
        options = {"states": states, "out": "bfloat16"}
        size = "medium" if states * count <= 32 else "large"
        yield Case(v3, "deepseek_v3", fp32, tokens(count), options, size)
    yield Case(v3, "deepseek_v3", fp32, tokens(128), {"states": 4, "scale": SCALE}, "large")


def workload_case(
    dims: MLADims, dims_name: str, dtype: np.dtype, workload: Workload, size: str
) -> Case | None:
    """Four float32 splits of each decoded token with context to `dtype`; None without one."""
    options = {"states": 4, "out": dtype.name}
    decodes = workload.decodes()
    case = Case(dims, dims_name, arrays.DTYPES["float32"], decodes, options, size)
    return case if query_tokens(case) else None


def cost(case: Case) -> Cost:
    """Every partial once in, the merged state once out."""
    rows = query_tokens(case) * case.dims.N
    states, width = case.options["states"], case.dims.L
    lse = 0 if case.options.get("no_lse") else 4
    return Cost(
        bytes_read=rows * states * (width * case.dtype.itemsize + 4),
        bytes_written=rows * (width * _out_dtype(case).itemsize + lse),
        flops=rows * states * 2 * width,
    )


def tolerance(case: Case) -> dict[str, Tolerance]:
    """Half an ulp for the one rounding to 16 bits; float32 sums over the states add an ulp each."""
    ulps = 4 + case.options["states"] if _out_dtype(case).itemsize == 4 else 0.51
    out = codes(case.dims.L) if "scale" in case.options else Tolerance(ulps)
    return {"out": out, "out_lse": Tolerance(ulps=4)}
