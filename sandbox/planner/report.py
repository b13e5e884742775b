"""What a context plan makes the kernels do."""

from __future__ import annotations

from dataclasses import dataclass

from sandbox.cache_formats import format_by_name
from sandbox.dims import MLADims
from sandbox.planner.chunks import ContextPlan
from sandbox.planner.context_parallel import ContextParallel
from sandbox.planner.workspace import workspace_of

SLIVER = 16
"""A piece of less than this part of the workspace is a sliver."""


@dataclass(frozen=True)
class Report:
    """What a plan makes the kernels do.

    Attributes:
        chunks, least_chunks: passes over the context, and a bound below which no plan can go.
        context_rows, padding_rows: rows gathered on all ranks that are context, and that are not.
        merges, merged_tokens: chunks that continue a request, and its new tokens in all.
        slivers: pieces of split requests below a sixteenth of the workspace.
        gather_bytes: read from the cache.
        peak_bytes: workspace, up-projected keys and values of the largest chunk, of all ranks'
            rows.
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


def report(
    plan: ContextPlan, dims: MLADims, cache_format: str = "bfloat16", *, itemsize: int = 2
) -> Report:
    """Chunks, rows, merges, bytes and FLOPs of a plan for `dims` and a cache format.

    An attention of `q` queries over `k` keys counts `2 q k N (P + R + V)`.
    """
    fmt = format_by_name(cache_format)
    pieces, rows = plan.pieces, plan.chunk_rows
    tokens = int(pieces.length.sum())
    queries = plan.query_lens[pieces.request]
    per_pair = 2 * dims.N * (dims.qk_head_dim + dims.V)
    new = plan.query_lens
    world_size = plan.padding.tokens // plan.padding.rows
    ranks = ContextParallel(world_size) if world_size > 1 else None
    most = plan.padding.held(int(rows.max(initial=0)))
    split = (pieces.start > 0) | (pieces.length < plan.context_lens[pieces.request])
    continued = pieces.bounds[:-1][plan.continues]
    return Report(
        chunks=len(plan),
        least_chunks=-(-int(plan.padding.needed(plan.context_lens).sum()) // plan.budget),
        context_rows=tokens,
        padding_rows=plan.padding.held(int(rows.sum())) - tokens,
        merges=len(continued),
        merged_tokens=int(queries[continued].sum()),
        slivers=int((split & (SLIVER * pieces.length < plan.padding.held(plan.budget))).sum()),
        gather_bytes=tokens * fmt.row_bytes(dims),
        peak_bytes=workspace_of(most, dims, itemsize=itemsize, parallel=ranks).total_bytes,
        context_flops=per_pair * int((queries * pieces.length).sum()),
        new_flops=per_pair * int((new * (new + 1)).sum()) // 2,
    )
