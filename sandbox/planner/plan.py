"""The whole plan of a step, what it costs, and its arrays in one buffer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sandbox.cache_formats import FORMATS
from sandbox.dims import MLADims
from sandbox.planner.batch import (
    Batch,
    Order,
    decodes_first,
    lengths,
    plan_batch,
    split_decodes_and_prefills,
)
from sandbox.planner.chunks import (
    ContextPlan,
    RowPadding,
    bounds_in_chunks,
    plan_context_chunks,
)
from sandbox.planner.packed import Packed, pack
from sandbox.planner.workspace import workspace_of


@dataclass(frozen=True)
class Report:
    """What a plan makes the kernels do.

    Attributes:
        chunks, least_chunks: passes over the context, and a bound below which no plan can go.
        context_rows, padding_rows: rows gathered that are context, and that are not.
        merges, merged_tokens: chunks that continue a request, and its new tokens in all.
        slivers: pieces below a sixteenth of the workspace that a split left.
        gather_bytes: read from the cache.
        peak_bytes: workspace, up-projected keys and values of the largest chunk.
        context_flops, new_flops: attention over the context and over the new tokens.
    """

    chunks: int
    least_chunks: int
    context_rows: int
    padding_rows: int
    merges: int
    merged_tokens: int
    slivers: int
    gather_bytes: int
    peak_bytes: int
    context_flops: int
    new_flops: int


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

        `positions`, `slot_mapping`, `query_start_loc`, `seq_lens`; and of the chunks, one after
        the other, `chunk_starts`, `chunk_cu_seq_lens` and `chunk_query_start_loc`: those of chunk
        `c` are `chunk_slices(c)`.
        """
        batch, pieces, plan = self.batch, self.context.pieces, self.context
        arrays = {
            "positions": batch.positions,
            "slot_mapping": batch.slot_mapping,
            "query_start_loc": batch.query_start_loc,
            "seq_lens": batch.seq_lens,
            "chunk_starts": pieces.start.astype(np.int32),
            "chunk_cu_seq_lens": bounds_in_chunks(plan.padding.needed(pieces.length), pieces),
            "chunk_query_start_loc": bounds_in_chunks(plan.query_lens[pieces.request], pieces),
        }
        return pack(arrays, buffer)

    def chunk_slices(self, chunk: int) -> tuple[slice, slice]:
        """Where chunk `chunk` stands in `chunk_starts`, and in the two arrays of bounds."""
        begin, end = self.context.pieces.bounds[chunk : chunk + 2].tolist()
        return slice(begin, end), slice(begin + chunk, end + chunk + 1)

    def report(self, dims: MLADims, cache_format: str = "bfloat16", *, itemsize: int = 2) -> Report:
        """What the kernels have to do, for `dims` and a cache format."""
        plan = self.context
        pieces, rows = plan.pieces, plan.chunk_rows
        tokens = int(pieces.length.sum())
        gathered = int(rows.sum())
        queries = plan.query_lens[pieces.request]
        per_pair = 2 * dims.N * (dims.qk_head_dim + dims.V)
        new = plan.query_lens
        split = (pieces.start > 0) | (pieces.length < plan.context_lens[pieces.request])
        continued = pieces.bounds[:-1][plan.continues]
        whole = int(plan.padding.needed(plan.context_lens).sum())
        return Report(
            chunks=len(plan),
            least_chunks=-(-whole // plan.budget),
            context_rows=tokens,
            padding_rows=gathered - tokens,
            merges=len(continued),
            merged_tokens=int(queries[continued].sum()),
            slivers=int((split & (16 * pieces.length < plan.budget)).sum()),
            gather_bytes=tokens * FORMATS[cache_format].row_bytes(dims),
            peak_bytes=workspace_of(int(rows.max(initial=0)), dims, itemsize=itemsize).total_bytes,
            context_flops=per_pair * int((queries * pieces.length).sum()),
            new_flops=per_pair * int((new * (new + 1)).sum()) // 2,
        )


def plan_step(
    query_lens: Any,
    context_lens: Any,
    block_table: np.ndarray,
    block_size: int,
    workspace_rows: int,
    *,
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
        workspace_rows: rows that one pass over the context may gather.
        alignment: requests are split at its multiples; None is `block_size`.
        padding, strategy: as for `plan_context_chunks`; the strategy orders the prefills.
        is_prefill, decode_threshold, require_uniform: as for `decodes_first`.
        batch_options: as for `plan_batch`.

    Raises:
        TypeError, ValueError: as `plan_batch` and `plan_context_chunks`.
    """
    query, context = lengths(query_lens, "query_lens"), lengths(context_lens, "context_lens")
    if query.shape != context.shape or len(block_table) < len(query):
        raise ValueError(
            f"{len(query)} query_lens, {len(context)} context_lens and {len(block_table)} rows of "
            "block_table do not fit together"
        )
    rules = {"decode_threshold": decode_threshold, "require_uniform": require_uniform}
    order = decodes_first(query, is_prefill=is_prefill, **rules).order
    flags = None if is_prefill is None else np.asarray(is_prefill, bool)[order]
    first = split_decodes_and_prefills(query[order], is_prefill=flags, **rules).num_decodes
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
        np.asarray(block_table)[order],
        block_size,
        is_prefill=None if is_prefill is None else np.asarray(is_prefill, bool)[order],
        **rules,
        **batch_options,
    )
    return Plan(Order.of(order), batch, chunks)
