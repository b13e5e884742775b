"""Problems for gather: what is asked, what the arrays hold, what it must cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from sandbox.cache_formats import FORMATS, CacheFormat
from sandbox.dims import PRESETS, MLADims
from sandbox.kernels import case as c
from sandbox.kernels.case import Case, Workload
from sandbox.kernels.op import Cost, Tolerance

ODD_ROW = MLADims(3, 56, 43, 24, 2, 16)
"""Rows of 45 elements: 16-bit rows are only 2-byte aligned."""
ODD_CODES = MLADims(3, 56, 42, 24, 6, 16)
"""Rows of 48 values that do not divide into groups of 8 at the key."""
TILED = MLADims(3, 56, 256, 24, 8, 16)
"""The least interesting dims with tiles of 128."""
K_SCALE = 0.37
CODES = np.dtype(np.uint8)


def packed_rows(xp: Any, count: int, fmt: CacheFormat, dims: MLADims, seed: int) -> Any:
    """Rows of a packed format: encoded normal values, every other row with any codes at all."""
    values = c.normal(xp, (count, dims.E), np.dtype(np.float32), seed)
    rows = fmt.encode(values, dims, **c.encode_options(fmt, K_SCALE))
    codes = xp.asarray(np.random.default_rng(seed).integers(0, 256, rows.shape, dtype=np.uint8))
    for field in fmt.layout(dims):
        if field.dtype.itemsize == 1:
            part = slice(field.offset, field.offset + field.nbytes)
            rows[1::2, part] = codes[1::2, part]
    return rows


def restore_arguments(case: Case, xp: Any) -> dict[str, Any]:
    """What a call on packed rows says of them; `case.dtype` uint8 copies codes."""
    fmt = case.format
    if not fmt.packed:
        return {}
    arguments: dict[str, Any] = {"cache_format": fmt.name, "out_dtype": case.dtype}
    if case.dtype != CODES:
        arguments["kv_lora_rank"] = case.dims.L
        if fmt.needs_scale:
            arguments["k_scale"] = xp.asarray(np.array([K_SCALE], np.float32))
    return arguments


def make_inputs(case: Case, xp: Any) -> dict[str, Any]:
    """A padded, permuted cache with NaN wherever no request reads, and garbage table columns.

    Options: `block_size`; `format` of a packed cache, whose rows are restored to the case's dtype
    or copied if that is uint8; `starts` (unaligned seq_starts); `spare` (rows of `out` beyond the
    last, and a first row before `cu_seq_lens[0]`).
    """
    fmt, block_size = case.format, case.options["block_size"]
    lens = case.workload.context_lens
    starts = [(7 * i + 3) % (2 * block_size + 1) for i in range(len(lens))]
    if not case.options.get("starts"):
        starts = [0] * len(lens)
    spans = [start + n for start, n in zip(starts, lens)]
    used = c.blocks_needed(spans, block_size)
    num_blocks = used + 3
    table = c.block_tables(spans, block_size, num_blocks, case.seed)
    vector = max(1, 16 // fmt.storage.itemsize) * case.options.get("padded", True)
    shape = fmt.cache_shape(case.dims, num_blocks, block_size)
    cache = c.padded_pages(xp, shape, fmt.storage, vector, 2 * vector)
    wanted = np.zeros((num_blocks, block_size), dtype=bool)
    for row, start, end in zip(table, starts, spans):
        positions = np.arange(start, end)
        wanted[row[positions // block_size], positions % block_size] = True
    wanted = xp.asarray(wanted)
    count = int(wanted.sum())
    if fmt.packed:
        cache[wanted] = packed_rows(xp, count, fmt, case.dims, case.seed)
    else:
        cache[wanted] = c.normal(xp, (count, case.dims.E), case.dtype, case.seed)
    spare = case.options.get("spare", 0)
    cu = c.cumulative(lens) + np.int32(spare > 0)
    inputs = {
        "cache": cache,
        "block_table": c.narrowed(xp, table),
        "cu_seq_lens": xp.asarray(cu),
        "seq_starts": xp.asarray(np.asarray(starts, np.int32)) if any(starts) else None,
        "num_tokens": int(cu[-1]),
        **restore_arguments(case, xp),
    }
    if spare:
        inputs["out"] = _workspace(xp, int(cu[-1]) + spare, _columns(case), case.dtype)
    return inputs


def dequantize_inputs(case: Case, xp: Any) -> dict[str, Any]:
    """Codes of the context rows. Options: `format`; `spare` (rows of `out` beyond the last, and
    codes in padded rows)."""
    fmt, tokens = case.format, case.workload.context_tokens
    spare = case.options.get("spare", 0)
    codes = c.padded_pages(xp, fmt.cache_shape(case.dims, 1, tokens), CODES, 16 * (spare > 0), 0)[0]
    codes[...] = packed_rows(xp, tokens, fmt, case.dims, case.seed)
    inputs = {"codes": codes, **restore_arguments(case, xp)}
    if spare:
        inputs["out"] = _workspace(xp, tokens + spare, case.dims.E, case.dtype)
    return inputs


def _workspace(xp: Any, rows: int, columns: int, dtype: np.dtype) -> Any:
    """Poisoned rows with padding between."""
    padding = max(1, 16 // dtype.itemsize)
    return c.unwritten(xp, (rows, columns + padding), dtype)[:, :columns]


def _columns(case: Case) -> int:
    copied = not case.format.packed or case.dtype == CODES
    return case.format.row_elements(case.dims) if copied else case.dims.E


def cases(purpose: str) -> Iterable[Case]:
    if purpose == "conformance":
        yield from _conformance()
        yield from _packed_conformance()
    else:
        yield from _compare()
        yield from _packed_compare()


def dequantize_cases(purpose: str) -> Iterable[Case]:
    packed = _packed_conformance() if purpose == "conformance" else _packed_compare()
    for case in packed:
        if case.dtype != CODES and case.workload.name != "many":
            kept = {k: v for k, v in case.options.items() if k in ("format", "spare")}
            yield replace(case, options=kept)


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


def _packed_conformance() -> Iterable[Case]:
    """Each packed format to each dtype, copied, at odd widths, at a real model's, and empty."""
    bf16 = c.dtypes("bfloat16")[0]
    ragged = Workload("ragged", (1, 9, 0, 5), (1, 1, 1, 1))
    for fmt in FORMATS.values():
        if not fmt.packed:
            continue
        tiled = bool(fmt.tile_scales)
        name, dims = ("tiled", TILED) if tiled else ("tiny", PRESETS["tiny"])
        options = {"block_size": 4, "format": fmt.name, "starts": True, "spare": 2}
        for dtype in (*c.dtypes("float32", "float16", "bfloat16"), CODES):
            yield Case(dims, name, dtype, ragged, options)
        if not tiled:
            yield Case(ODD_CODES, "odd_codes", bf16, ragged, {**options, "block_size": 3})
        short = {"block_size": 64, "format": fmt.name}
        v3 = PRESETS["deepseek_v3"]
        yield Case(v3, "deepseek_v3", bf16, Workload("short", (70, 0, 3), ()), short, "medium")
        yield Case(dims, name, bf16, Workload("nobody", (), ()), short)
    many = Workload("many", tuple(i % 3 for i in range(300)), ())
    yield Case(TILED, "tiled", bf16, many, {"block_size": 1, "format": "fp8_ds_mla"}, "medium")
    long = Workload("1+4097+64+63", (1, 4097, 64, 63), (1,) * 4)
    options = {"block_size": 16, "format": "fp8_ds_mla", "starts": True, "spare": 1}
    yield Case(TILED, "tiled", bf16, long, options, "medium")


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


def _packed_compare() -> Iterable[Case]:
    bf16, v3 = c.dtypes("bfloat16")[0], PRESETS["deepseek_v3"]
    for fmt in FORMATS.values():
        if not fmt.packed:
            continue
        options = {"block_size": 64, "format": fmt.name, "padded": False}
        name, dims = ("tiled", TILED) if fmt.tile_scales else ("tiny", PRESETS["tiny"])
        mixed = Workload("mixed", (37, 0, 12, 5), (1,) * 4)
        yield Case(dims, name, bf16, mixed, {"block_size": 16, "format": fmt.name})
        for requests, rows in ((3, 40), (8, 1024), (1, 65536), (8, 8192), (64, 1024)):
            workload = Workload(f"{requests}x{rows}", (rows,) * requests, (1,) * requests)
            size = "medium" if requests * rows <= 1024 else "large"
            yield Case(v3, "deepseek_v3", bf16, workload, options, size)
    copied = {"block_size": 64, "format": "fp8_e4m3", "padded": False}
    workload = Workload("1x65536", (65536,), (1,))
    yield Case(v3, "deepseek_v3", CODES, workload, copied, "large")


def workload_case(
    dims: MLADims, dims_name: str, dtype: np.dtype, workload: Workload, size: str
) -> Case | None:
    """The context rows of a batch's prefills, or None where none has context: decodes read the
    cache in place."""
    workload = workload.prefills()
    if not workload.context_tokens:
        return None
    return Case(dims, dims_name, dtype, workload, {"block_size": 64, "padded": False}, size)


def dequantize_workload(
    dims: MLADims, dims_name: str, dtype: np.dtype, workload: Workload, size: str
) -> Case | None:
    """The context rows of a batch's prefills in fp8."""
    case = workload_case(dims, dims_name, dtype, workload, size)
    return None if case is None else replace(case, options={"format": "fp8_e4m3"})


def cost(case: Case) -> Cost:
    """Each row once in and once out, and the tables."""
    moved = dequantize_cost(case)
    blocks = c.blocks_needed(case.workload.context_lens, case.options["block_size"])
    tables = 4 * (blocks + 2 * len(case.workload.context_lens) + 1)
    return replace(moved, bytes_read=moved.bytes_read + tables)


def dequantize_cost(case: Case) -> Cost:
    """Each row once in and once out."""
    rows, fmt = case.workload.context_tokens, case.format
    return Cost(
        bytes_read=rows * fmt.row_bytes(case.dims),
        bytes_written=rows * _columns(case) * case.dtype.itemsize,
    )


def tolerance(case: Case) -> dict[str, Tolerance]:
    """Copies bit for bit; restored rows are rounded once, so they have one value too."""
    return {"out": Tolerance(any_nan=case.format.packed and case.dtype != CODES)}
