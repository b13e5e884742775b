"""Problems for gather: what is asked, what the arrays hold, what it must cost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from sandbox.dims import PRESETS, MLADims
from sandbox.kernels import case as c
from sandbox.kernels.case import Case, Workload
from sandbox.kernels.op import Cost, Tolerance

ODD_ROW = MLADims(3, 56, 43, 24, 2, 16)
"""Rows of 45 elements: 16-bit rows are only 2-byte aligned."""


def make_inputs(case: Case, xp: Any) -> dict[str, Any]:
    """A padded, permuted cache with NaN wherever no request reads, and garbage table columns.

    Options: `block_size`; `starts` (unaligned seq_starts); `spare` (rows of `out` beyond the
    last, and a first row before `cu_seq_lens[0]`).
    """
    block_size = case.options["block_size"]
    lens = case.workload.context_lens
    starts = [(7 * i + 3) % (2 * block_size + 1) for i in range(len(lens))]
    if not case.options.get("starts"):
        starts = [0] * len(lens)
    spans = [start + n for start, n in zip(starts, lens)]
    used = c.blocks_needed(spans, block_size)
    num_blocks = used + 3
    table = c.block_tables(spans, block_size, num_blocks, case.seed)
    vector = max(1, 16 // case.dtype.itemsize)
    padded = case.options.get("padded", True)
    shape = (num_blocks, block_size, case.dims.E)
    cache = c.padded_pages(xp, shape, case.dtype, vector * padded, 2 * vector * padded)
    wanted = np.zeros((num_blocks, block_size), dtype=bool)
    for row, start, end in zip(table, starts, spans):
        positions = np.arange(start, end)
        wanted[row[positions // block_size], positions % block_size] = True
    wanted = xp.asarray(wanted)
    cache[wanted] = c.normal(xp, (int(wanted.sum()), case.dims.E), case.dtype, case.seed)
    spare = case.options.get("spare", 0)
    cu = c.cumulative(lens) + np.int32(spare > 0)
    inputs = {
        "cache": cache,
        "block_table": c.narrowed(xp, table),
        "cu_seq_lens": xp.asarray(cu),
        "seq_starts": xp.asarray(np.asarray(starts, np.int32)) if any(starts) else None,
        "num_tokens": int(cu[-1]),
    }
    if spare:
        out = xp.empty((int(cu[-1]) + spare, case.dims.E + vector), case.dtype)
        out.view(np.uint8)[...] = 0xFF
        inputs["out"] = out[:, : case.dims.E]
    return inputs


def cases(purpose: str) -> Iterable[Case]:
    if purpose == "conformance":
        yield from _conformance()
    else:
        yield from _compare()


def _conformance() -> Iterable[Case]:
    tiny, v3 = PRESETS["tiny"], PRESETS["deepseek_v3"]
    ragged = Workload("ragged", (1, 9, 0, 5), (1, 1, 1, 1))
    for dtype in c.dtypes("float32", "float16", "bfloat16"):
        yield Case(tiny, "tiny", dtype, ragged, {"block_size": 4, "starts": True, "spare": 2})
        yield Case(ODD_ROW, "odd_row", dtype, ragged, {"block_size": 3, "starts": True})
    bf16 = c.dtypes("bfloat16")[0]
    for name, lens in (("empty", (0, 0, 0)), ("nobody", ()), ("one", (1,))):
        yield Case(tiny, "tiny", bf16, Workload(name, lens, ()), {"block_size": 4})
    long = Workload("1+4097+64+63", (1, 4097, 64, 63), (1,) * 4)
    yield Case(tiny, "tiny", bf16, long, {"block_size": 16, "starts": True}, "medium")
    for dtype in c.dtypes("bfloat16", "float32"):
        options = {"block_size": 64, "starts": True, "spare": 1}
        yield Case(v3, "deepseek_v3", dtype, Workload("short", (70, 0, 3), ()), options, "medium")
    many = Workload("many", tuple(i % 3 for i in range(300)), ())
    yield Case(tiny, "tiny", bf16, many, {"block_size": 1}, "medium")


def _compare() -> Iterable[Case]:
    bf16 = c.dtypes("bfloat16")[0]
    for name in ("tiny", "kimi_linear"):
        mixed = Workload("mixed", (37, 0, 12, 5), (1,) * 4)
        for dtype in c.dtypes("float32", "float16", "bfloat16"):
            size = "small" if name == "tiny" else "medium"
            yield Case(PRESETS[name], name, dtype, mixed, {"block_size": 16}, size)
    v3 = PRESETS["deepseek_v3"]
    for requests, rows in ((1, 1), (16, 1), (64, 1), (8, 1024), (1, 65536), (8, 8192), (64, 1024)):
        workload = Workload(f"{requests}x{rows}", (rows,) * requests, (1,) * requests)
        size = "medium" if requests * rows <= 8192 else "large"
        options = {"block_size": 64, "padded": False}
        yield Case(v3, "deepseek_v3", bf16, workload, options, size)


def workload_case(
    dims: MLADims, dims_name: str, dtype: np.dtype, workload: Workload, size: str
) -> Case | None:
    """The context rows of a batch's prefills, or None where none has context: decodes read the
    cache in place."""
    workload = workload.prefills()
    if not workload.context_tokens:
        return None
    return Case(dims, dims_name, dtype, workload, {"block_size": 64, "padded": False}, size)


def cost(case: Case) -> Cost:
    """Each row once in and once out, and the tables."""
    row = case.dims.E * case.dtype.itemsize
    blocks = c.blocks_needed(case.workload.context_lens, case.options["block_size"])
    tables = 4 * (blocks + 2 * len(case.workload.context_lens) + 1)
    rows = case.workload.context_tokens
    return Cost(bytes_read=rows * row + tables, bytes_written=rows * row)


def tolerance(case: Case) -> dict[str, Tolerance]:
    return {"out": Tolerance()}
