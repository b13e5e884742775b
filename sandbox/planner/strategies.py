"""Orders of the prefills and ways to cut their contexts, by name.

A strategy takes context lengths `[B]` and a cutter and returns an order of the requests and the
pieces of that order. None has more chunks than `in_order` has.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable

import numpy as np

from sandbox.planner.pieces import Cutter, Pieces, in_order

Strategy = Callable[[np.ndarray, Cutter], tuple[np.ndarray, Pieces]]


def as_given(context: np.ndarray, cutter: Cutter) -> tuple[np.ndarray, Pieces]:
    """The requests as they are; each chunk is filled, by part of a request where need be."""
    return np.arange(len(context)), in_order(context, cutter)


def context_first(context: np.ndarray, cutter: Cutter) -> tuple[np.ndarray, Pieces]:
    """Requests without context go last, where they end no chunk early."""
    order = np.argsort(context == 0, kind="stable")
    return order, in_order(context[order], cutter)


def fewest_merges(context: np.ndarray, cutter: Cutter) -> tuple[np.ndarray, Pieces]:
    """Requests that fit are not split: the longest first, each into the fullest chunk with room.

    A request beyond the workspace has chunks of its own but for its last part, which others join.
    Where that takes more chunks than splitting does, the other strategy with fewer merges is taken.
    """
    return min(
        (
            whole_requests(context, cutter),
            as_given(context, cutter),
            context_first(context, cutter),
        ),
        key=lambda plan: (plan[1].num_chunks, int(plan[1].continues.sum())),
    )


def whole_requests(context: np.ndarray, cutter: Cutter) -> tuple[np.ndarray, Pieces]:
    """The packing of `fewest_merges`, however many chunks it takes."""
    bins = _pack(context, cutter)
    order, request, start, length, counts = [], [], [], [], []
    for cuts, members in bins:
        place = len(order)
        order += members
        begins = [0, *np.cumsum(cuts).tolist()]
        for begin, cut in zip(begins, cuts):
            request.append(place)
            start.append(begin)
            length.append(cut)
            counts.append(1)
        for offset, member in enumerate(members[1:], 1):
            request.append(place + offset)
            start.append(0)
            length.append(int(context[member]))
            counts[-1] += 1
    order += np.flatnonzero(context == 0).tolist()
    bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    pieces = Pieces(*(np.array(x, np.int64) for x in (request, start, length)), bounds)
    return np.array(order, np.int64), pieces


def _pack(context: np.ndarray, cutter: Cutter) -> list[tuple[list[int], list[int]]]:
    """Bins of best-fit decreasing: the cuts of the first request, and all requests of the last."""
    rows = cutter.padding.needed(context)
    order = np.argsort(-context, kind="stable")
    order = order[context[order] > 0]
    bins: list[tuple[list[int], list[int]]] = []
    rooms: list[tuple[int, int]] = []  # rows left, bin; sorted
    for member, length, needed in zip(
        order.tolist(), context[order].tolist(), rows[order].tolist()
    ):
        if needed <= cutter.budget:
            place = bisect_left(rooms, (needed, -1))
            if place < len(rooms):
                room, which = rooms.pop(place)
                bins[which][1].append(member)
                insort(rooms, (room - needed, which))
                continue
        cuts, left = [], length
        while cutter.padding.needed(left) > cutter.budget:
            cut = cutter.prefix(cutter.budget, left)
            if cut <= 0:
                raise cutter.too_small(member, left)
            cuts.append(cut)
            left -= cut
        bins.append(([*cuts, left], [member]))
        insort(rooms, (cutter.budget - cutter.padding.needed(left), len(bins) - 1))
    return bins


STRATEGIES: dict[str, Strategy] = {
    "in_order": as_given,
    "context_first": context_first,
    "fewest_merges": fewest_merges,
}
