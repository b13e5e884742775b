"""Problems for prefill_attention: what is asked, what the arrays hold, what it must cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from sandbox import arrays
from sandbox.cache_formats import E4M3
from sandbox.dims import PRESETS, MLADims
from sandbox.kernels import case as c
from sandbox.kernels.case import Case, Workload
from sandbox.kernels.lse import lse_shape
from sandbox.kernels.op import Cost, Tolerance

ODD_HEADS = MLADims(3, 56, 43, 23, 6, 19)
"""Heads of 29 and 19 elements, which no vector access fits."""
WIDE_VALUES = MLADims(2, 56, 40, 24, 16, 56)
"""Values wider than keys, neither a multiple of 16."""
DESCALES = {"q_descale": 0.11, "k_descale": 0.07, "v_descale": 0.23}
SCALE_FACTOR = 1.37
"""What a YaRN model multiplies the softmax scale by; with 1 its absence would not show."""


def key_lens(case: Case) -> tuple[int, ...]:
    """Keys of each request: context and new tokens if causal, else the context alone."""
    work = case.workload
    if not case.options.get("causal", True):
        return work.context_lens
    return tuple(map(sum, zip(work.context_lens, work.query_lens)))


def make_inputs(case: Case, xp: Any) -> dict[str, Any]:
    """Queries, keys and values that are NaN wherever no request has a row.

    Options: `causal`; `fp8` (E4M3 codes, case.dtype is the result's); `sharp` (a factor of the
    queries, so that few keys weigh much); `views` (columns of wider arrays, values padded to the
    keys' width, a strided result); `spare` (rows that no request owns); `base`, `layout`, `no_lse`.
    """
    options, dims, work = case.options, case.dims, case.workload
    spare, views = options.get("spare", 0), options.get("views", False)
    cu_q, cu_k = c.cumulative(work.query_lens), c.cumulative(key_lens(case)) + np.int32(spare)
    tokens, keys = int(cu_q[-1]), int(cu_k[-1])
    inputs: dict[str, Any] = {
        "cu_seqlens_q": xp.asarray(cu_q),
        "cu_seqlens_k": xp.asarray(cu_k),
        "softmax_scale": SCALE_FACTOR * dims.softmax_scale,
        "causal": options.get("causal", True),
        "lse_base": options.get("base", "e"),
        "lse_layout": options.get("layout", "NT"),
        "return_lse": not options.get("no_lse", False),
    }
    for place, (name, first, count, width, total) in enumerate(
        (
            ("q", 0, tokens, dims.qk_head_dim, tokens + spare),
            ("k", spare, keys - spare, dims.qk_head_dim, keys + spare),
            ("v", spare, keys - spare, dims.V, keys + spare),
        )
    ):
        values = c.normal(xp, (count, dims.N, width), np.dtype(np.float32), case.seed + place)
        if name == "q":
            values *= np.float32(options.get("sharp", 1.0))
        if options.get("fp8"):
            descale = np.float32(DESCALES[f"{name}_descale"])
            values = E4M3.quantize(values, descale)
            inputs[f"{name}_descale"] = xp.asarray(np.array([descale]))
        else:
            values = values.astype(case.dtype)
        inputs[name] = _rows(xp, values, first, total, 16 if views else 0)
    if options.get("fp8"):
        inputs["out_dtype"] = case.dtype
    if views:
        shape = (tokens + spare, dims.N, dims.V)
        wide = c.unwritten(xp, (shape[1], shape[0], dims.V + 8), case.dtype)
        inputs["out"] = wide.swapaxes(0, 1)[..., : dims.V]
        if inputs["return_lse"]:
            lse = lse_shape(shape, inputs["lse_layout"])
            inputs["out_lse"] = c.unwritten(xp, (lse[0], 2 * lse[1]), np.dtype(np.float32))[:, ::2]
    return inputs


def _rows(xp: Any, values: Any, first: int, total: int, pad: int) -> Any:
    """The values as rows from `first` on of `total`, the others and the padding NaN."""
    tokens, heads, width = values.shape
    wide = c.unwritten(xp, (total, heads, width + pad), values.dtype)[..., :width]
    wide[first : first + tokens] = values
    return wide


def cases(purpose: str) -> Iterable[Case]:
    yield from _conformance() if purpose == "conformance" else _compare()


def _conformance() -> Iterable[Case]:
    tiny, v3 = PRESETS["tiny"], PRESETS["deepseek_v3"]
    fp32, fp16, bf16 = c.dtypes("float32", "float16", "bfloat16")
    ragged = Workload("ragged", (4, 0, 2, 0), (3, 1, 0, 5))
    for dtype in (fp32, fp16, bf16):
        options = {"views": True, "spare": 2, "sharp": 4.0, "layout": "TN", "base": "2"}
        yield Case(tiny, "tiny", dtype, ragged, options)
        yield Case(ODD_HEADS, "odd_heads", dtype, ragged, {"spare": 1})
    context = Workload("context", (7, 0, 3), (2, 4, 1))
    yield Case(tiny, "tiny", bf16, context, {"causal": False, "spare": 1})
    yield Case(tiny, "tiny", bf16, ragged, {"fp8": True, "spare": 2})
    yield Case(ODD_HEADS, "odd_heads", fp32, context, {"fp8": True, "causal": False, "views": True})
    yield Case(tiny, "tiny", bf16, ragged, {"no_lse": True})
    for name, queries in (("empty", (0, 0)), ("nobody", ())):
        yield Case(tiny, "tiny", bf16, Workload(name, (0,) * len(queries), queries), {"spare": 3})
        yield Case(tiny, "tiny", bf16, Workload(name, (0,) * len(queries), queries))
    tiles = Workload("tiles", (0, 70, 0, 64), (130, 3, 1, 65))
    for dtype in (fp16, bf16):
        options = {"views": True, "spare": 2}
        yield Case(WIDE_VALUES, "wide_values", dtype, tiles, options, "medium")
    yield Case(tiny, "tiny", bf16, tiles, {"causal": False, "layout": "TN"}, "medium")
    yield Case(tiny, "tiny", bf16, tiles, {"fp8": True, "sharp": 3.0}, "medium")
    few = Workload("few", (30, 0), (20, 70))
    heads = replace(v3, num_heads=2)
    for dtype in (fp16, bf16):
        yield Case(heads, "two_heads_v3", dtype, few, {"sharp": 2.0}, "medium")
    yield Case(heads, "two_heads_v3", bf16, few, {"views": True, "causal": False}, "medium")
    yield Case(v3, "deepseek_v3", bf16, Workload("short", (3, 0), (2, 9)), {}, "medium")
    long = Workload("1+700", (1000, 0), (1, 700))
    yield Case(heads, "two_heads_v3", bf16, long, {}, "large")


def _compare() -> Iterable[Case]:
    bf16, v3 = c.dtypes("bfloat16")[0], PRESETS["deepseek_v3"]
    mixed = Workload("mixed", (12, 0, 3), (5, 13, 1))
    for dtype in c.dtypes("float32", "float16", "bfloat16"):
        yield Case(PRESETS["tiny"], "tiny", dtype, mixed)
    for requests, tokens in ((1, 24), (1, 2048), (1, 8192), (4, 2048), (16, 512)):
        size = "medium" if tokens < 100 else "large"
        workload = Workload(f"{requests}x{tokens}", (0,) * requests, (tokens,) * requests)
        yield Case(v3, "deepseek_v3", bf16, workload, {}, size)
    ragged = (300, 1700, 4096, 2096)
    workload = Workload("300+1700+4096+2096", (0,) * 4, ragged)
    yield Case(v3, "deepseek_v3", bf16, workload, {}, "large")
    context = Workload("2048over8192", (8192,), (2048,))
    yield Case(v3, "deepseek_v3", bf16, context, {"causal": False}, "large")
    workload = Workload("1x2048", (0,), (2048,))
    yield Case(v3, "deepseek_v3", bf16, workload, {"fp8": True}, "large")


def workload_case(
    dims: MLADims, dims_name: str, dtype: np.dtype, workload: Workload, size: str
) -> Case | None:
    """The new tokens of a batch's prefills, which attend to each other; None without any."""
    prefills = workload.prefills()
    if not prefills.query_tokens:
        return None
    alone = replace(prefills, context_lens=(0,) * len(prefills.query_lens))
    return Case(dims, dims_name, dtype, alone, {}, size)


def pairs(case: Case) -> int:
    """Pairs of a query and a key that it sees."""
    causal = case.options.get("causal", True)
    total = 0
    for n, m in zip(case.workload.query_lens, key_lens(case)):
        hidden = n * (n - 1) // 2 if causal else 0
        total += n * m - hidden
    return total


def cost(case: Case) -> Cost:
    """Each array once, and two products for each pair that meets."""
    dims, work = case.dims, case.workload
    element = 1 if case.options.get("fp8") else case.dtype.itemsize
    rows = work.query_tokens * dims.N
    keys = sum(key_lens(case)) * dims.N
    lse = 0 if case.options.get("no_lse") else 4
    return Cost(
        bytes_read=(rows * dims.qk_head_dim + keys * (dims.qk_head_dim + dims.V)) * element
        + 8 * (len(work.query_lens) + 1),
        bytes_written=rows * (dims.V * case.dtype.itemsize + lse),
        flops=2 * pairs(case) * dims.N * (dims.qk_head_dim + dims.V),
    )


def tolerance(case: Case) -> dict[str, Tolerance]:
    """Probabilities may be rounded to 16 bits where the inputs are; LSEs come of float32 sums."""
    exact = case.dtype == arrays.DTYPES["float32"]
    ulps = 64.0
    if not exact:
        ulps = 2.0
    elif case.options.get("fp8"):
        ulps = 2.0**16
    return {"out": Tolerance(ulps, by_row=True), "out_lse": Tolerance(ulps=64)}
