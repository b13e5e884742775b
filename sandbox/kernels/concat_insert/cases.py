"""Problems for the three ops: what is asked, what the arrays hold, what it must cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from sandbox.dims import PRESETS, MLADims
from sandbox.kernels import case as c
from sandbox.kernels.case import Case, Workload
from sandbox.kernels.op import Cost, Tolerance

ODD = MLADims(3, 56, 43, 24, 6, 16)
"""Rows of 49 elements, three pairs from element 43 on: 16-bit pairs are only 2-byte aligned."""
MANY_HEADS = replace(ODD, num_heads=90)
"""More heads than threads over pairs, and a number of pairs that does not divide the threads."""
NO_ROPE_COLUMNS = MLADims(3, 56, 40, 24, 0, 16)
NOT_ROTATED = replace(PRESETS["tiny"], rope=False)

MIXED = Workload("mixed", (5, 0, 17), (3, 1, 3))
NOBODY = Workload("nobody", (), ())
ONE = Workload("one", (9,), (1,))
MANY = Workload("many", (0, 70, 3), (600, 1, 40))


def positions_of(workload: Workload) -> np.ndarray:
    """int64 position of every new token in its request."""
    spans = zip(workload.context_lens, workload.query_lens)
    return np.concatenate([np.zeros(0), *[s + np.arange(n) for s, n in spans]]).astype(np.int64)


def slots_of(case: Case) -> tuple[np.ndarray, int]:
    """Permuted slots, some -1 with the option `skipped`, and the blocks that hold them."""
    tokens, block_size = case.workload.query_tokens, case.options["block_size"]
    num_blocks = -(-tokens // block_size) + 2
    rng = np.random.default_rng(case.seed)
    slots = rng.permutation(num_blocks * block_size)[:tokens].astype(np.int64)
    if case.options.get("skipped"):
        slots[rng.random(tokens) < 0.3] = -1
    return slots, num_blocks


def rope_table(rows: int, width: int) -> np.ndarray:
    """float32 `[rows, width]`: cosines, then sines, of position * 10000^(-2i / width)."""
    frequencies = 10000.0 ** (-np.arange(0, width, 2) / max(width, 1))
    angles = np.arange(rows)[:, None] * frequencies
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


class Maker:
    """Arrays of a case. With the option `views` inputs are columns of wider NaN-filled arrays, with
    two rows more than there are tokens, as a padded graph hands them over."""

    def __init__(self, case: Case, xp: Any) -> None:
        self.case, self.xp = case, xp
        self.views = case.options.get("views", True)
        self.rows = case.workload.query_tokens + 2 * self.views
        self.offset = 1 if case.dims.L % 2 else 16  # elements before a view: odd dims, odd address

    def values(self, *shape: int, seed: int) -> Any:
        seed += 100 * self.case.seed
        if self.views:
            return c.column_slice(self.xp, shape, self.case.dtype, seed, self.offset)
        return c.normal(self.xp, shape, self.case.dtype, seed)

    def latent_and_key(self) -> dict[str, Any]:
        """kv_c as a norm leaves it, or a slice beside k_pe; k_pe a slice of its projection."""
        dims, rows = self.case.dims, self.rows
        both = self.values(rows, dims.E, seed=1)
        kv_c = both[:, : dims.L] if self.views else self.values(rows, dims.L, seed=2)
        return {"kv_c": kv_c, "k_pe": both[:, dims.L :] if dims.R else None}

    def cache_and_slots(self) -> dict[str, Any]:
        slots, num_blocks = slots_of(self.case)
        shape = (num_blocks, self.case.options["block_size"], self.case.dims.E)
        pad = max(1, 16 // self.case.dtype.itemsize) * self.views
        cache = c.padded_pages(self.xp, shape, self.case.dtype, pad, 2 * pad)
        return {"cache": cache, "slot_mapping": self.xp.asarray(slots)}

    def rotation(self) -> dict[str, Any]:
        dims, positions = self.case.dims, positions_of(self.case.workload)
        if not dims.rope or not dims.R:
            return {}
        table = rope_table(int(positions.max(initial=0)) + 3, dims.R)
        return {"positions": self.xp.asarray(positions), "cos_sin": self.xp.asarray(table)}


def insert_inputs(case: Case, xp: Any) -> dict[str, Any]:
    """Options: `block_size`; `skipped` (30% negative slots); `views` (default)."""
    maker = Maker(case, xp)
    return {**maker.latent_and_key(), **maker.cache_and_slots()}


def prefill_inputs(case: Case, xp: Any) -> dict[str, Any]:
    """Options as `insert_inputs`, and `in_place` (q_out is q)."""
    maker, dims = Maker(case, xp), case.dims
    q = maker.values(maker.rows, dims.N, dims.P + dims.R, seed=3)
    projected = maker.values(maker.rows, dims.N, dims.P + dims.V, seed=4)
    projected[..., dims.P :] = np.nan
    return {
        "q": q,
        "k_nope": projected[..., : dims.P],
        **maker.latent_and_key(),
        **maker.cache_and_slots(),
        **maker.rotation(),
        "q_out": q if case.options.get("in_place") else None,
    }


def decode_inputs(case: Case, xp: Any) -> dict[str, Any]:
    """Options as `insert_inputs`; ql_nope is always a transposed product `[N, T, L]`."""
    maker, dims = Maker(case, xp), case.dims
    q = maker.values(maker.rows, dims.N, dims.P + dims.R, seed=5)
    return {
        "ql_nope": maker.values(dims.N, maker.rows, dims.L, seed=6).swapaxes(0, 1),
        "q_pe": q[..., dims.P :] if dims.R else None,
        **maker.latent_and_key(),
        **maker.cache_and_slots(),
        **maker.rotation(),
    }


def _decode_step(workload: Workload) -> Workload:
    """One new token a request."""
    return replace(workload, query_lens=(1,) * len(workload.query_lens))


def insert_cases(purpose: str) -> Iterable[Case]:
    return _conformance() if purpose == "conformance" else _compare()


def prefill_cases(purpose: str) -> Iterable[Case]:
    if purpose != "conformance":
        yield from (_with(case, in_place=True) for case in _compare())
        yield from (case for case in _compare() if case.size == "large")
        return
    yield from _conformance()
    bf16 = c.dtypes("bfloat16")[0]
    for name, dims in (("tiny", PRESETS["tiny"]), ("not_rotated", NOT_ROTATED), ("odd", ODD)):
        yield Case(dims, name, bf16, MIXED, {"block_size": 4, "in_place": True, "skipped": True})
    options = {"block_size": 16, "in_place": True}
    yield Case(MANY_HEADS, "many_heads", bf16, MANY, options, "medium")


def decode_cases(purpose: str) -> Iterable[Case]:
    if purpose == "conformance":
        yield from _conformance()
    else:
        for case in _compare(1, 16, 64, 128, 512):
            yield replace(case, workload=_decode_step(case.workload))


def _with(case: Case, **options: Any) -> Case:
    return replace(case, options={**case.options, **options})


def _conformance() -> Iterable[Case]:
    tiny, bf16 = PRESETS["tiny"], c.dtypes("bfloat16")[0]
    options = {"block_size": 4, "skipped": True}
    for dtype in c.dtypes("float32", "float16", "bfloat16"):
        yield Case(tiny, "tiny", dtype, MIXED, options)
    for dtype in c.dtypes("float32", "bfloat16"):
        yield Case(ODD, "odd", dtype, MIXED, {"block_size": 3})
    yield Case(NO_ROPE_COLUMNS, "no_rope_columns", bf16, MIXED, options)
    yield Case(NOT_ROTATED, "not_rotated", bf16, MIXED, options)
    yield Case(tiny, "tiny", bf16, NOBODY, options)
    yield Case(tiny, "tiny", bf16, ONE, {"block_size": 1})
    yield Case(tiny, "tiny", bf16, MANY, {"block_size": 16, "skipped": True}, "medium")
    short = Workload("short", (130, 0), (4, 1))
    options = {"block_size": 64, "skipped": True}
    yield Case(PRESETS["deepseek_v3"], "deepseek_v3", bf16, short, options, "medium")


def _compare(*token_counts: int) -> Iterable[Case]:
    for name in ("tiny", "kimi_linear"):
        for dtype in c.dtypes("float32", "float16", "bfloat16"):
            size = "small" if name == "tiny" else "medium"
            yield Case(PRESETS[name], name, dtype, MIXED, {"block_size": 16, "views": False}, size)
    v3, bf16 = PRESETS["deepseek_v3"], c.dtypes("bfloat16")[0]
    for tokens in token_counts or (1, 16, 64, 1024, 8192):
        requests = -(-tokens // 1024) if tokens > 512 else tokens
        each = tokens // requests
        workload = Workload(f"{tokens}tokens", (100,) * requests, (each,) * requests)
        size = "medium" if tokens <= 64 else "large"
        yield Case(v3, "deepseek_v3", bf16, workload, {"block_size": 64, "views": False}, size)


def insert_workload(
    dims: MLADims, dims_name: str, dtype: np.dtype, workload: Workload, size: str
) -> Case | None:
    """All new tokens of a batch, or None where there are none."""
    if not workload.query_tokens:
        return None
    options = {"block_size": 64, "views": False}
    return Case(dims, dims_name, dtype, workload, options, size)


def prefill_workload(
    dims: MLADims, dims_name: str, dtype: np.dtype, workload: Workload, size: str
) -> Case | None:
    """The new tokens of a batch's prefills, or None where there are none."""
    return insert_workload(dims, dims_name, dtype, workload.prefills(), size)


def decode_workload(
    dims: MLADims, dims_name: str, dtype: np.dtype, workload: Workload, size: str
) -> Case | None:
    """The new tokens of a batch's decodes, or None where there are none."""
    return insert_workload(dims, dims_name, dtype, workload.decodes(), size)


def _kept(case: Case) -> int:
    return int((slots_of(case)[0] >= 0).sum())


def _rope_bytes(case: Case) -> int:
    """Positions, and each row of the table that they name once."""
    if not case.dims.rope or not case.dims.R:
        return 0
    positions = positions_of(case.workload)
    return 8 * len(positions) + 4 * case.dims.R * len(np.unique(positions))


def insert_cost(case: Case) -> Cost:
    """Each inserted row once in and once out, and the slots."""
    row = _kept(case) * case.dims.E * case.dtype.itemsize
    return Cost(bytes_read=row + 8 * case.workload.query_tokens, bytes_written=row)


def prefill_cost(case: Case) -> Cost:
    """Head outputs of every token, cache rows of those with a slot; q in place moves R columns."""
    dims, item, tokens = case.dims, case.dtype.itemsize, case.workload.query_tokens
    rotated = dims.rope and dims.R > 0
    q_width = dims.P + dims.R
    if case.options.get("in_place"):
        q_width = dims.R if rotated else 0
    read = tokens * (dims.N * (q_width + dims.P) + dims.R) + _kept(case) * dims.L
    written = tokens * dims.N * (q_width + dims.P + dims.R) + _kept(case) * dims.E
    return Cost(
        bytes_read=item * read + 8 * tokens + _rope_bytes(case),
        bytes_written=item * written,
        flops=3 * dims.R * tokens * (dims.N + 1) * rotated,
    )


def decode_cost(case: Case) -> Cost:
    """Queries of every token, cache rows of those with a slot."""
    dims, item, tokens = case.dims, case.dtype.itemsize, case.workload.query_tokens
    queries = tokens * dims.N * dims.E
    rows = _kept(case) * dims.E
    return Cost(
        bytes_read=item * (queries + rows) + 8 * tokens + _rope_bytes(case),
        bytes_written=item * (queries + rows),
        flops=3 * dims.R * (tokens * dims.N + _kept(case)) * (dims.rope and dims.R > 0),
    )


def _copied_then_rotated(case: Case, copied: int) -> Tolerance:
    """The first columns bit for bit; rotated ones about one unit in the last place.

    In 16 bits that is the last rounding. In float32 the products round as well, and their
    difference may be smaller than they are.
    """
    if not case.dims.rope or not case.dims.R:
        return Tolerance()
    return Tolerance(4.0 if case.dtype == np.float32 else 1.0, slice(0, copied))


def insert_tolerance(case: Case) -> dict[str, Tolerance]:
    return {"cache": Tolerance()}


def prefill_tolerance(case: Case) -> dict[str, Tolerance]:
    heads = _copied_then_rotated(case, case.dims.P)
    latent = _copied_then_rotated(case, case.dims.L)
    return {"q_out": heads, "k_out": heads, "cache": latent}


def decode_tolerance(case: Case) -> dict[str, Tolerance]:
    rows = _copied_then_rotated(case, case.dims.L)
    return {"q_out": rows, "cache": rows}
