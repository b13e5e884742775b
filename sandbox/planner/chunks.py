"""Contexts of prefills in chunks that a workspace of bounded rows can hold.

A chunk is a run of consecutive requests; each of them has context in it, from `starts` on. Only its
first request may continue from the chunk before, so that merging partial results touches the first
tokens of a chunk alone. A request without context ends a chunk.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import numpy as np

from sandbox.planner.batch import lengths, offsets


@dataclass(frozen=True)
class RowPadding:
    """Rows that a context of `n` tokens takes in the workspace: `ceil(n / tokens) * rows`.

    (1, 1) is a row a token. With context parallelism `tokens` are those of one block on all ranks,
    `rows` those of one rank.
    """

    tokens: int = 1
    rows: int = 1

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.rows < 1:
            raise ValueError(f"RowPadding({self.tokens}, {self.rows}): expected positive numbers")

    def needed(self, n: Any) -> Any:
        """Rows for `n` tokens, a number or an array."""
        return -(-n // self.tokens) * self.rows

    def held(self, rows: int) -> int:
        """The most tokens that so many rows hold."""
        return rows // self.rows * self.tokens

    def before(self, start: Any) -> Any:
        """Rows that stand before an aligned start: where a rank's part of a chunk begins."""
        return start // self.tokens * self.rows


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
class Pieces:
    """Pieces of contexts in the order of the chunks: arrays of equal length, and their bounds.

    Attributes:
        request, start, length: int64, whose piece it is, its first position, its tokens.
        bounds: int64 `[chunks + 1]`, pieces of each chunk.
    """

    request: np.ndarray
    start: np.ndarray
    length: np.ndarray
    bounds: np.ndarray

    @property
    def num_chunks(self) -> int:
        return len(self.bounds) - 1


class _Cutter:
    """How much of one request fits."""

    def __init__(self, budget: int, max_chunk: int, alignment: int, padding: RowPadding) -> None:
        self.max_chunk, self.alignment, self.padding = max_chunk, alignment, padding
        self.budget = budget

    def prefix(self, room: int, left: int) -> int:
        """The longest aligned part of `left` tokens for `room` rows, never all of them."""
        most = min(self.padding.held(room), self.max_chunk, left - 1)
        return most // self.alignment * self.alignment


def in_order(context: np.ndarray, cutter: _Cutter) -> Pieces:
    """Fill each chunk with requests in turn; who does not fit is split where it is aligned."""
    rows = cutter.padding.needed(context)
    before = np.concatenate([[0], np.cumsum(rows)]).tolist()
    lens = context.tolist()
    count = len(lens)
    gaps = np.flatnonzero(context == 0).tolist()
    spans: list[tuple[int, int]] = []  # of whole requests, one a chunk
    heads: list[tuple[int, int, int, int]] = []  # chunk, request, start, length
    tails: list[tuple[int, int, int, int]] = []
    request = start = gap = 0
    while request < count:
        while gap < len(gaps) and gaps[gap] < request:
            gap += 1
        stop = gaps[gap] if gap < len(gaps) else count
        if request == stop:
            request += 1
            continue
        chunk, room = len(spans), cutter.budget
        if start:
            left = lens[request] - start
            needed = cutter.padding.needed(left)
            if needed > room:
                piece = cutter.prefix(room, left)
                heads.append((chunk, request, start, piece))
                spans.append((request, request))
                start += piece
                continue
            heads.append((chunk, request, start, left))
            room -= needed
            request, start = request + 1, 0
        end = min(bisect_right(before, before[request] + room) - 1, stop)
        room -= before[end] - before[request]
        spans.append((request, end))
        empty = end == request and not (heads and heads[-1][0] == chunk)
        request = end
        if request < stop:
            start = cutter.prefix(room, lens[request])
            if start > 0:
                tails.append((chunk, request, 0, start))
            elif empty:
                raise ValueError(
                    f"the workspace of {cutter.budget} rows is too small: request {request} needs "
                    f"{cutter.padding.needed(min(cutter.alignment, lens[request]))} rows for its "
                    f"first {min(cutter.alignment, lens[request])} tokens"
                )
            start = max(start, 0)
    return _assemble(context, spans, heads, tails)


def _assemble(
    context: np.ndarray,
    spans: list[tuple[int, int]],
    heads: list[tuple[int, int, int, int]],
    tails: list[tuple[int, int, int, int]],
) -> Pieces:
    """Whole requests, heads and tails as arrays in the order of chunks and requests."""
    first, end = np.array(spans, np.int64).reshape(-1, 2).T
    counts = end - first
    chunk = np.repeat(np.arange(len(spans)), counts)
    whole = np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
    parts = np.array([*heads, *tails], np.int64).reshape(-1, 4)
    chunks = np.concatenate([chunk, parts[:, 0]])
    request = np.concatenate([whole, parts[:, 1]])
    start = np.concatenate([np.zeros_like(whole), parts[:, 2]])
    length = np.concatenate([context[whole], parts[:, 3]])
    order = np.argsort(chunks * (len(context) + 1) + request, kind="stable")
    bounds = np.searchsorted(chunks[order], np.arange(len(spans) + 1))
    return Pieces(request[order], start[order], length[order], bounds)


def bounds_in_chunks(lens: np.ndarray, pieces: Pieces) -> np.ndarray:
    """int32 bounds, from 0 in each chunk, of runs as long as `lens` says for each piece.

    Those of chunk `c` are the elements from `pieces.bounds[c] + c` to `pieces.bounds[c + 1] + c`.
    """
    total = np.concatenate([[0], np.cumsum(lens)])
    chunk = np.repeat(np.arange(pieces.num_chunks), np.diff(pieces.bounds))
    bounds = np.zeros(len(lens) + pieces.num_chunks, np.int32)
    bounds[np.arange(len(lens)) + chunk + 1] = total[1:] - total[pieces.bounds[chunk]]
    return bounds


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
        return self.pieces.start[self.pieces.bounds[:-1]] > 0

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
    from sandbox.planner.strategies import STRATEGIES

    context, query = lengths(context_lens, "context_lens"), lengths(query_lens, "query_lens")
    if context.shape != query.shape:
        raise ValueError(f"context_lens has {len(context)} requests, query_lens {len(query)}")
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy is {strategy!r}, expected one of {', '.join(STRATEGIES)}")
    padding = padding or RowPadding()
    context = np.where(query > 0, context, 0)
    if row_budget is None:
        row_budget = max(int(padding.needed(context).sum()), 1)
    if row_budget < 1 or alignment < 1:
        raise ValueError(
            f"row_budget is {row_budget} and alignment {alignment}, expected at least 1"
        )
    if alignment % padding.tokens:
        raise ValueError(
            f"alignment is {alignment}, expected a multiple of the padding's {padding.tokens}"
        )
    if max_chunk is None:
        max_chunk = max(padding.held(row_budget), alignment)
    if max_chunk < alignment:
        raise ValueError(f"max_chunk is {max_chunk}, less than the alignment {alignment}")
    cutter = _Cutter(row_budget, max_chunk, alignment, padding)
    order, pieces = STRATEGIES[strategy](context, cutter)
    return ContextPlan(order, context[order], query[order], pieces, row_budget, padding, strategy)
