"""Contexts cut into pieces, each piece into a chunk: how many rows they take, and what fits."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import numpy as np


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

    @property
    def continues(self) -> np.ndarray:
        """bool `[chunks]`: whether a chunk's first piece continues a request."""
        return self.start[self.bounds[:-1]] > 0


class Cutter:
    """How much of one request fits."""

    def __init__(self, budget: int, max_chunk: int, alignment: int, padding: RowPadding) -> None:
        self.max_chunk, self.alignment, self.padding = max_chunk, alignment, padding
        self.budget = budget

    def prefix(self, room: int, left: int) -> int:
        """The longest aligned part of `left` tokens for `room` rows, never all of them."""
        most = min(self.padding.held(room), self.max_chunk, left - 1)
        return most // self.alignment * self.alignment

    def too_small(self, request: int, left: int) -> ValueError:
        """What to raise where not even the first aligned part of `left` tokens fits."""
        least = min(self.alignment, left)
        return ValueError(
            f"the workspace of {self.budget} rows is too small: request {request} needs "
            f"{self.padding.needed(least)} rows for its first {least} tokens"
        )


def in_order(context: np.ndarray, cutter: Cutter) -> Pieces:
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
                raise cutter.too_small(request, lens[request])
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
