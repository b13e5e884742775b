"""Contexts of prefills in chunks that a workspace of bounded rows can hold.

A chunk is a run of consecutive requests; each of them has context in it, from `starts` on. Only its
first request may continue from the chunk before, so that merging partial results touches the first
tokens of a chunk alone. A request without context ends a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sandbox.planner.batch import lengths, offsets
from sandbox.planner.counts import positive
from sandbox.planner.pieces import Cutter, Pieces, RowPadding
from sandbox.planner.strategies import STRATEGIES


@dataclass(frozen=True)
class Chunk:
    """One pass over part of the context; requests and tokens are counted among the prefills.

    Attributes:
        requests: their slice.
        tokens: slice of their new tokens.
        starts: int32, first context position of each.
        cu_seq_lens: int32, bounds of their rows in the workspace, from 0.
        query_start_loc: int32, bounds of their new tokens, from 0.
        num_context_tokens: tokens of context in the chunk.
        is_continuation: whether the first request has context in the chunk before.
        continuation_token_end: end of that request's new tokens, among the prefills'.
        max_query_len, max_context_len: the largest of one request.
    """

    requests: slice
    tokens: slice
    starts: np.ndarray
    cu_seq_lens: np.ndarray
    query_start_loc: np.ndarray
    num_context_tokens: int
    is_continuation: bool
    continuation_token_end: int
    max_query_len: int
    max_context_len: int

    @property
    def written_in_place(self) -> bool:
        """Whether attention may write its partial straight into the accumulated output."""
        return not self.is_continuation

    @property
    def merged_tokens(self) -> int:
        """New tokens at the chunk's start whose partial result has to be merged."""
        return self.continuation_token_end - self.tokens.start if self.is_continuation else 0


@dataclass(frozen=True)
class ContextPlan:
    """Chunks of the prefills' contexts, in the order that a strategy gives the prefills.

    Without any context there are no chunks, and the plan is false.

    Attributes:
        order: int64 `[B]`, place `i` holds prefill `order[i]` of those given.
        context_lens, query_lens: int64 `[B]`, in that order.
        pieces: of contexts, in the order of the chunks.
        budget, padding: rows of the workspace, and how contexts take them.
        strategy: its name.
    """

    order: np.ndarray
    context_lens: np.ndarray
    query_lens: np.ndarray
    pieces: Pieces
    budget: int
    padding: RowPadding
    strategy: str

    def __bool__(self) -> bool:
        return self.pieces.num_chunks > 0

    def __len__(self) -> int:
        return self.pieces.num_chunks

    @property
    def continues(self) -> np.ndarray:
        """bool `[chunks]`: whether a chunk's first piece continues a request."""
        return self.pieces.continues

    @property
    def chunk_rows(self) -> np.ndarray:
        """int64 `[chunks]`: rows of the workspace that each chunk takes."""
        rows = self.padding.needed(self.pieces.length)
        return np.add.reduceat(rows, self.pieces.bounds[:-1]) if self else np.zeros(0, np.int64)

    @property
    def empty_token_slices(self) -> list[slice]:
        """New tokens, among the prefills', of requests without context."""
        empty = np.concatenate([[0], self.context_lens == 0, [0]]).astype(np.int8)
        edges = np.flatnonzero(np.diff(empty))
        bounds = offsets(self.query_lens)[edges].reshape(-1, 2)
        return [slice(int(a), int(b)) for a, b in bounds if a < b]

    @property
    def needs_merge(self) -> bool:
        """Whether partial results meet: more chunks than one, or tokens without context."""
        return len(self) > 1 or bool(self.empty_token_slices)

    def chunks(self) -> list[Chunk]:
        """The chunks, with arrays of their own."""
        queries = offsets(self.query_lens)
        local = self.padding.needed(self.pieces.length)
        found = []
        for begin, end in zip(self.pieces.bounds[:-1].tolist(), self.pieces.bounds[1:].tolist()):
            requests = slice(int(self.pieces.request[begin]), int(self.pieces.request[end - 1]) + 1)
            bounds = queries[requests.start : requests.stop + 1]
            continued = bool(self.pieces.start[begin] > 0)
            found.append(
                Chunk(
                    requests=requests,
                    tokens=slice(int(bounds[0]), int(bounds[-1])),
                    starts=self.pieces.start[begin:end].astype(np.int32),
                    cu_seq_lens=offsets(local[begin:end]),
                    query_start_loc=bounds - bounds[0],
                    num_context_tokens=int(self.pieces.length[begin:end].sum()),
                    is_continuation=continued,
                    continuation_token_end=int(bounds[1]) if continued else int(bounds[0]),
                    max_query_len=int(np.diff(bounds).max()),
                    max_context_len=int(self.pieces.length[begin:end].max()),
                )
            )
        return found


def plan_context_chunks(
    context_lens: Any,
    query_lens: Any,
    row_budget: int | None,
    *,
    max_chunk: int | None = None,
    alignment: int = 1,
    padding: RowPadding | None = None,
    strategy: str = "in_order",
) -> ContextPlan:
    """Put every context token of the prefills into exactly one chunk of at most `row_budget` rows.

    Args:
        context_lens, query_lens: cached and new tokens of each prefill, `[B]`. Who has no new
            token needs no context.
        row_budget: rows of the workspace; None is as many as it takes.
        max_chunk: most tokens of a part of a request that is split, at least `alignment`; None is
            what the workspace holds.
        alignment: requests are split at multiples of it; a multiple of the padding's tokens.
        padding: rows a context takes; None is one a token.
        strategy: a name in `STRATEGIES`.

    Raises:
        TypeError, ValueError: lengths that do not fit together, an unknown strategy, or a
            workspace too small for one aligned part of a request.
    """
    context, query = lengths(context_lens, "context_lens"), lengths(query_lens, "query_lens")
    if context.shape != query.shape:
        raise ValueError(f"context_lens has {len(context)} requests, query_lens {len(query)}")
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy is {strategy!r}, expected one of {', '.join(STRATEGIES)}")
    padding = padding or RowPadding()
    context = np.where(query > 0, context, 0)
    if row_budget is None:
        row_budget = max(int(padding.needed(context).sum()), 1)
    positive(row_budget=row_budget, alignment=alignment)
    if alignment % padding.tokens:
        raise ValueError(
            f"alignment is {alignment}, expected a multiple of the padding's {padding.tokens}"
        )
    if max_chunk is None:
        max_chunk = max(padding.held(row_budget), alignment)
    if max_chunk < alignment:
        raise ValueError(f"max_chunk is {max_chunk}, less than the alignment {alignment}")
    cutter = Cutter(row_budget, max_chunk, alignment, padding)
    order, pieces = STRATEGIES[strategy](context, cutter)
    return ContextPlan(order, context[order], query[order], pieces, row_budget, padding, strategy)
