"""Paged latent rows to a contiguous workspace."""

from __future__ import annotations

import itertools
from typing import Any

from sandbox.cache_formats import FORMATS
from sandbox.kernels import require
from sandbox.kernels.gather import cases, reference
from sandbox.kernels.op import Output, operation


def _check_values(
    cache: Any,
    block_table: Any,
    cu_seq_lens: Any,
    seq_starts: Any,
    num_tokens: int,
    out: Any,
) -> None:
    cu = cu_seq_lens.tolist()
    starts = seq_starts.tolist() if seq_starts is not None else [0] * (len(cu) - 1)
    if cu[0] < 0 or any(a > b for a, b in itertools.pairwise(cu)):
        raise ValueError("cu_seq_lens must not decrease and must not start below 0")
    if cu[-1] > num_tokens:
        raise ValueError(f"num_tokens is {num_tokens}, but cu_seq_lens ends at {cu[-1]}")
    num_blocks, block_size, _ = cache.shape
    for request, (start, begin, end) in enumerate(zip(starts, cu, cu[1:])):
        if begin == end:
            continue
        if start < 0:
            raise ValueError(f"seq_starts[{request}] is {start}, expected at least 0")
        columns = -(-(start + end - begin) // block_size)
        if columns > block_table.shape[1]:
            raise ValueError(
                f"block_table has {block_table.shape[1]} columns, too narrow for request "
                f"{request}, which needs {columns}"
            )
        used = block_table[request, start // block_size : columns]
        if int(used.min()) < 0 or int(used.max()) >= num_blocks:
            raise ValueError(
                f"block_table row {request} has an id outside 0..{num_blocks - 1}; "
                "it holds block ids, not slots"
            )


@operation(
    reference=reference.gather,
    make_inputs=cases.make_inputs,
    cases=cases.cases,
    workload_case=cases.workload_case,
    cost=cases.cost,
    tolerance=cases.tolerance,
    check_values=_check_values,
    returns=("out",),
    main_argument="cache",
)
def gather(
    cache: Any,
    block_table: Any,
    cu_seq_lens: Any,
    *,
    seq_starts: Any = None,
    num_tokens: int | None = None,
    out: Any = None,
) -> dict[str, Any]:
    """Copy paged latent rows into a contiguous workspace, bit for bit.

    Row `cu_seq_lens[b] + j` of `out` becomes the cache row at position `seq_starts[b] + j` of
    request `b`. Rows before `cu_seq_lens[0]` and from `cu_seq_lens[B]` on are left as they are.
    A position whose block-table column or block id is out of range gives a row of zeros.

    Args:
        cache: `[num_blocks, block_size, E]`, float32, float16 or bfloat16; pages and rows may be
            strided, the last axis is contiguous.
        block_table: int32 `[B, columns]`, block ids (not slots); columns past a request's length
            are never read.
        cu_seq_lens: int32 `[B + 1]`, non-decreasing row bounds of the requests in `out`.
        seq_starts: int32 `[B]`, first position of each request, any alignment; None is 0.
        num_tokens: rows that `out` must hold, a host integer at least `cu_seq_lens[B]`. None
            reads `cu_seq_lens[B]`, which waits for the GPU and cannot be captured in a graph.
        out: `[>= num_tokens, E]` of the cache's dtype, rows may be strided; None allocates
            `[num_tokens, E]`. It shares no memory with the cache.

    Returns:
        `out`.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, dtype, rank or size; nothing has
            been launched.
    """
    require.array(cache, "cache", "num_blocks", "block_size", "E")
    require.dtype(cache, "cache", *(fmt.storage for fmt in FORMATS.values()))
    require.strided_rows(cache, "cache")
    if cache.shape[1] == 0 or cache.shape[2] == 0:
        raise ValueError(f"cache has shape {cache.shape}: block_size and E must be positive")
    require.array(block_table, "block_table", "requests", "columns")
    require.dtype(block_table, "block_table", "int32")
    require.strided_rows(block_table, "block_table")
    require.array(cu_seq_lens, "cu_seq_lens", "requests + 1")
    require.dtype(cu_seq_lens, "cu_seq_lens", "int32")
    require.strided_rows(cu_seq_lens, "cu_seq_lens")
    requests = block_table.shape[0]
    require.size(cu_seq_lens, "cu_seq_lens", 0, requests + 1, "one more than block_table's rows")
    if seq_starts is not None:
        require.array(seq_starts, "seq_starts", "requests")
        require.dtype(seq_starts, "seq_starts", "int32")
        require.strided_rows(seq_starts, "seq_starts")
        require.size(seq_starts, "seq_starts", 0, requests, "one for each row of block_table")
    if num_tokens is None:
        num_tokens = int(cu_seq_lens[-1])
    num_tokens = require.integer(num_tokens, "num_tokens")
    rows = num_tokens
    if out is not None:
        require.array(out, "out", "tokens", "E")
        require.at_least(out, "out", 0, num_tokens, "the workspace must hold num_tokens rows")
        require.Memory(out, "out").apart(require.Memory(cache, "cache"))
        rows = out.shape[0]
    return {"num_tokens": num_tokens, "out": Output((rows, cache.shape[2]), cache.dtype)}
