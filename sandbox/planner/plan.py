"""The whole plan of a step, what it costs, and its arrays in one buffer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sandbox.dims import MLADims
from sandbox.planner.batch import (
    Batch,
    Order,
    block_ids,
    decodes_first,
    lengths,
    plan_batch,
    split_decodes_and_prefills,
)
from sandbox.planner.chunks import ContextPlan, plan_context_chunks
from sandbox.planner.context_parallel import ContextParallel
from sandbox.planner.counts import positive
from sandbox.planner.packed import Packed, pack
from sandbox.planner.pieces import RowPadding, bounds_in_chunks
from sandbox.planner.report import Report, report


@dataclass(frozen=True)
class Plan:
    """A batch, decodes first, and the context chunks of its prefills.

    `order` takes the caller's requests to the batch's; rows of `block_table` have to follow it.
    """

    order: Order
    batch: Batch
    context: ContextPlan

    def packed(self, buffer: np.ndarray | None = None) -> Packed:
        """All arrays that kernels read in one int32 buffer.

        `positions`, `slot_mapping`, `query_start_loc`, `seq_lens`, `context_lens`, `block_table`;
        and of the chunks, one after the other, `chunk_starts` (in rows of one rank),
        `chunk_cu_seq_lens` and `chunk_query_start_loc`: those of chunk `c` are `chunk_slices(c)`.
        """
        batch, pieces, plan = self.batch, self.context.pieces, self.context
        arrays = {
            "positions": batch.positions,
            "slot_mapping": batch.slot_mapping,
            "query_start_loc": batch.query_start_loc,
            "seq_lens": batch.seq_lens,
            "context_lens": batch.context_lens,
            "block_table": batch.block_table,
            "chunk_starts": plan.padding.before(pieces.start).astype(np.int32),
            "chunk_cu_seq_lens": bounds_in_chunks(plan.padding.needed(pieces.length), pieces),
            "chunk_query_start_loc": bounds_in_chunks(plan.query_lens[pieces.request], pieces),
        }
        return pack(arrays, buffer)

    def chunk_slices(self, chunk: int) -> tuple[slice, slice]:
        """Where chunk `chunk` stands in `chunk_starts`, and in the two arrays of bounds."""
        if not 0 <= chunk < len(self.context):
            raise IndexError(f"chunk {chunk} of {len(self.context)}")
        begin, end = self.context.pieces.bounds[chunk : chunk + 2].tolist()
        return slice(begin, end), slice(begin + chunk, end + chunk + 1)

    def report(self, dims: MLADims, cache_format: str = "bfloat16", *, itemsize: int = 2) -> Report:
        """What the kernels have to do, for `dims` and a cache format."""
        return report(self.context, dims, cache_format, itemsize=itemsize)


def plan_step(
    query_lens: Any,
    context_lens: Any,
    block_table: np.ndarray,
    block_size: int,
    workspace_rows: int | None,
    *,
    parallel: ContextParallel | None = None,
    rank: int = 0,
    is_prefill: Any = None,
    decode_threshold: int = 1,
    require_uniform: bool = False,
    alignment: int | None = None,
    padding: RowPadding | None = None,
    strategy: str = "in_order",
    **batch_options: Any,
) -> Plan:
    """Order a step's requests, decodes first, and plan the batch and its context chunks.

    Args:
        query_lens, context_lens, block_table: of each request, in any order; `Plan.order` says
            where each one went.
        workspace_rows: rows that one pass over the context may gather, with `parallel` on one
            rank; None is as many as it takes.
        parallel, rank: how contexts are spread over ranks and whose slots these are; padding and
            alignment are then those of `parallel`, and `block_size` is one rank's.
        alignment: requests are split at its multiples; None is `block_size`.
        padding, strategy: as for `plan_context_chunks`; the strategy orders the prefills.
        is_prefill, decode_threshold, require_uniform: as for `decodes_first`.
        batch_options: as for `plan_batch`.

    Raises:
        TypeError, ValueError: as `plan_batch` and `plan_context_chunks`.
    """
    positive(block_size=block_size)
    if workspace_rows is not None:
        positive(workspace_rows=workspace_rows)
    query, context = lengths(query_lens, "query_lens"), lengths(context_lens, "context_lens")
    if query.shape != context.shape:
        raise ValueError(f"context_lens has {len(context)} requests, query_lens {len(query)}")
    table = block_ids(block_table, len(query))
    if parallel is not None:
        padding, alignment = parallel.padding, parallel.alignment
    rules = {"decode_threshold": decode_threshold, "require_uniform": require_uniform}
    order = decodes_first(query, is_prefill=is_prefill, **rules).order
    flags = np.zeros(len(query), bool) if is_prefill is None else np.asarray(is_prefill, bool)
    split = split_decodes_and_prefills(query[order], is_prefill=flags[order], **rules)
    first = split.num_decodes
    chunks = plan_context_chunks(
        context[order[first:]],
        query[order[first:]],
        workspace_rows,
        alignment=block_size if alignment is None else alignment,
        padding=padding,
        strategy=strategy,
    )
    order[first:] = order[first:][chunks.order]
    batch = plan_batch(
        query[order],
        context[order],
        table[order],
        block_size,
        parallel=parallel,
        rank=rank,
        is_prefill=flags[order],
        **rules,
        **batch_options,
    )
    return Plan(Order.of(order), batch, chunks)
