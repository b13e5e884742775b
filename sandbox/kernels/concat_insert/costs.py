"""What the inserts must move, and how far their outputs may be from the oracle."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sandbox.cache_formats import E4M3, Field
from sandbox.kernels.case import Case
from sandbox.kernels.concat_insert.cases import positions_of, slots_of
from sandbox.kernels.op import Cost, Tolerance


def _kept(case: Case) -> int:
    return int((slots_of(case)[0] >= 0).sum())


def _rotated(case: Case) -> bool:
    return case.dims.rope and case.dims.R > 0


def _rope_bytes(case: Case) -> int:
    """Positions, and each row of the table that they name once."""
    if not _rotated(case):
        return 0
    positions = positions_of(case.workload)
    return 8 * len(positions) + 4 * case.dims.R * len(np.unique(positions))


def insert_cost(case: Case) -> Cost:
    """Each inserted row once in and once out, and the slots."""
    kept, fmt = _kept(case), case.format
    return Cost(
        bytes_read=kept * case.dims.E * case.dtype.itemsize + 8 * case.workload.query_tokens,
        bytes_written=kept * fmt.row_bytes(case.dims),
    )


def prefill_cost(case: Case) -> Cost:
    """Head outputs of every token, cache rows of those with a slot; q in place moves R columns."""
    dims, item, tokens = case.dims, case.dtype.itemsize, case.workload.query_tokens
    q_width = dims.P + dims.R
    if case.options.get("in_place"):
        q_width = dims.R if _rotated(case) else 0
    read = tokens * (dims.N * (q_width + dims.P) + dims.R) + _kept(case) * dims.L
    written = tokens * dims.N * (q_width + dims.P + dims.R)
    return Cost(
        bytes_read=item * read + 8 * tokens + _rope_bytes(case),
        bytes_written=item * written + insert_cost(case).bytes_written,
        flops=3 * dims.R * tokens * (dims.N + 1) * _rotated(case),
    )


def prefill_fp8_cost(case: Case) -> Cost:
    """As for the prefill of 16 bits, with v, and a byte a value of the heads."""
    dims, tokens = case.dims, case.workload.query_tokens
    both = prefill_cost(replace(case, options={**case.options, "in_place": False}))
    values = tokens * dims.N * (2 * (dims.P + dims.R) + dims.V)
    return replace(
        both,
        bytes_read=both.bytes_read + tokens * dims.N * dims.V * case.dtype.itemsize,
        bytes_written=values + insert_cost(case).bytes_written,
    )


def decode_cost(case: Case) -> Cost:
    """Queries of every token, cache rows of those with a slot."""
    dims, item, tokens = case.dims, case.dtype.itemsize, case.workload.query_tokens
    queries, rows = tokens * dims.N * dims.E, insert_cost(case)
    return Cost(
        bytes_read=item * queries + rows.bytes_read + _rope_bytes(case),
        bytes_written=(1 if case.options.get("fp8_query") else item) * queries + rows.bytes_written,
        flops=3 * dims.R * (tokens * dims.N + _kept(case)) * _rotated(case),
    )


def _ulps(case: Case) -> float:
    """In 16 bits that of the last rounding. In float32 the products round as well, and their
    difference may be smaller than they are."""
    return 4.0 if case.dtype == np.float32 else 1.0


def _copied_then_rotated(case: Case, copied: int) -> Tolerance:
    """The first columns bit for bit; rotated ones about one unit in the last place."""
    return Tolerance(_ulps(case), slice(0, copied)) if _rotated(case) else Tolerance()


def _codes(case: Case, copied: int, width: int) -> Tolerance:
    """E4M3 codes of `width` values, the first `copied` ones exact; rotated ones one code off."""
    fields = (
        Field("copied", 0, E4M3.dtype, copied),
        Field("rotated", copied, E4M3.dtype, width - copied),
    )
    return Tolerance(fields=fields, loose=("rotated",) if _rotated(case) else ())


def _row(case: Case) -> Tolerance:
    """A cache row: what was not rotated must be exact."""
    fmt = case.format
    if not fmt.packed:
        return _copied_then_rotated(case, case.dims.L)
    loose = ("k_pe", "k_pe_scale") if _rotated(case) else ()
    return Tolerance(4.0, fields=fmt.layout(case.dims), loose=loose)


def insert_tolerance(case: Case) -> dict[str, Tolerance]:
    return {"cache": Tolerance()}


def prefill_tolerance(case: Case) -> dict[str, Tolerance]:
    heads = _copied_then_rotated(case, case.dims.P)
    return {"q_out": heads, "k_out": heads, "cache": _row(case)}


def prefill_fp8_tolerance(case: Case) -> dict[str, Tolerance]:
    dims = case.dims
    heads = _codes(case, dims.P, dims.P + dims.R)
    return {"q_out": heads, "k_out": heads, "v_out": Tolerance(), "cache": _row(case)}


def decode_tolerance(case: Case) -> dict[str, Tolerance]:
    dims = case.dims
    fp8 = case.options.get("fp8_query")
    queries = _codes(case, dims.L, dims.E) if fp8 else _copied_then_rotated(case, dims.L)
    return {"q_out": queries, "cache": _row(case)}
