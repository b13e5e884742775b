"""A step's requests: decodes and prefills apart, positions, slots, offsets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sandbox.planner.counts import positive

if TYPE_CHECKING:
    from sandbox.planner.context_parallel import ContextParallel

PAD_SLOT = -1
"""The slot of a token whose row is not to be written."""
MOST = int(np.iinfo(np.int32).max)
TOKENS_AT_ONCE = 1 << 13
"""Temporary arrays of so many tokens stay in a CPU's cache, and the allocator keeps them."""


@dataclass(frozen=True)
class Split:
    """How many requests of a batch, from its start, are decodes, and how many tokens they have."""

    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int


@dataclass(frozen=True)
class Order:
    """A permutation of requests: place `i` of the new batch holds request `order[i]` of the old
    one, which finds itself at place `inverse[order[i]] = i`."""

    order: np.ndarray
    inverse: np.ndarray

    @staticmethod
    def of(order: np.ndarray) -> Order:
        inverse = np.empty_like(order)
        inverse[order] = np.arange(len(order))
        return Order(order, inverse)

    def tokens(self, query_lens: Any) -> np.ndarray:
        """int64 `[T]`: which token of the old batch stands at each place of the new one."""
        lens = lengths(query_lens, "query_lens")
        starts = offsets(lens)[:-1].astype(np.int64)
        moved = lens[self.order]
        return np.repeat(starts[self.order] - offsets(moved)[:-1], moved) + np.arange(moved.sum())


def lengths(values: Any, name: str) -> np.ndarray:
    """Lengths as an int64 array.

    Raises:
        TypeError, ValueError: no integers, more than one axis, or one that is negative or beyond
            int32, in which kernels take lengths.
    """
    array = np.asarray(values)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} is {array.dtype}, expected integers")
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape}, expected one axis")
    if array.size and int(array.min()) < 0:
        place = int(array.argmin())
        raise ValueError(f"{name}[{place}] is {int(array[place])}, expected at least 0")
    if array.size and int(array.max()) > MOST:
        place = int(array.argmax())
        raise ValueError(f"{name}[{place}] is {int(array[place])}, more than int32 can hold")
    return array.astype(np.int64)


def block_ids(table: Any, requests: int) -> np.ndarray:
    """A block table as kernels take it: int32, a row for each request.

    Raises:
        TypeError, ValueError: other elements, other axes, or too few rows.
    """
    table = np.asarray(table)
    if table.dtype != np.int32:
        raise TypeError(f"block_table is {table.dtype}, expected int32 block ids")
    if table.ndim != 2 or len(table) < requests:
        raise ValueError(
            f"block_table has shape {table.shape}, expected a row for each of {requests} requests"
        )
    return table


def offsets(lens: np.ndarray) -> np.ndarray:
    """Bounds `[B + 1]` of consecutive runs of these lengths, int32.

    Raises:
        ValueError: the last bound does not fit.
    """
    bounds = np.zeros(len(lens) + 1, np.int64)
    np.cumsum(lens, out=bounds[1:])
    if bounds[-1] > MOST:
        raise ValueError(f"{int(bounds[-1])} tokens in all, more than int32 offsets can hold")
    return bounds.astype(np.int32)


def _prefill_flags(lens: np.ndarray, threshold: int, is_prefill: Any) -> np.ndarray:
    """Who is a prefill: longer than the threshold, or flagged."""
    positive(decode_threshold=threshold)
    prefills = lens > threshold
    if is_prefill is None:
        return prefills
    flags = np.asarray(is_prefill, bool)
    if flags.shape != lens.shape:
        raise ValueError(f"is_prefill has shape {flags.shape}, expected {lens.shape}")
    return prefills | flags


def split_decodes_and_prefills(
    query_lens: Any,
    *,
    decode_threshold: int = 1,
    require_uniform: bool = False,
    is_prefill: Any = None,
) -> Split:
    """Where the prefills of a batch begin that has its decodes first.

    Args:
        query_lens: new tokens of each request.
        decode_threshold: most new tokens of a decode: 1, or 1 and the speculated ones.
        require_uniform: decodes all have the length of the first request; requests of length 0
            at the end of a batch without prefills are padding, and count as decodes with as many
            tokens as the others.
        is_prefill: flags `[B]`: a prompt's last chunk may be as short as a decode. None goes by
            length alone.

    Returns:
        The first request that is no decode, and all after it, are prefills.
    """
    lens = lengths(query_lens, "query_lens")
    stops = _prefill_flags(lens, decode_threshold, is_prefill)
    if not len(lens):
        return Split(0, 0, 0, 0)
    if require_uniform:
        others = stops | (lens != lens[0])
        boundary = int(others.argmax()) if others.any() else len(lens)
        if not stops[boundary:].any() and not lens[boundary:].any():
            return Split(len(lens), 0, int(lens[0]) * len(lens), 0)
    else:
        boundary = int(stops.argmax()) if stops.any() else len(lens)
    tokens = int(lens[:boundary].sum())
    return Split(boundary, len(lens) - boundary, tokens, int(lens.sum()) - tokens)


def decodes_first(
    query_lens: Any,
    *,
    decode_threshold: int = 1,
    require_uniform: bool = False,
    is_prefill: Any = None,
) -> Order:
    """The permutation that `split_decodes_and_prefills` wants; each kind keeps its order.

    With `require_uniform` the decodes are those of the length that most of them have (of two such
    lengths the longer); requests without a token go to the end.
    """
    lens = lengths(query_lens, "query_lens")
    later = _prefill_flags(lens, decode_threshold, is_prefill)
    if require_uniform:
        candidates = lens[~later & (lens > 0)]
        if candidates.size:
            counts = np.bincount(candidates)
            common = len(counts) - 1 - int(counts[::-1].argmax())
            later = later | (lens != common)
        later = np.where(lens == 0, 2, later)
    return Order.of(np.argsort(later, kind="stable"))


def token_requests(query_lens: np.ndarray) -> np.ndarray:
    """int32 `[T]`: the request of every new token."""
    return np.repeat(np.arange(len(query_lens), dtype=np.int32), query_lens)


def token_positions(context_lens: np.ndarray, query_lens: np.ndarray) -> np.ndarray:
    """int64 `[T]`: the position of every new token in its request."""
    starts = offsets(query_lens)
    positions = np.repeat(context_lens - starts[:-1], query_lens)
    positions += np.arange(starts[-1])
    return positions


def require_policy(out_of_range: str) -> None:
    """ValueError unless it is one of the two that `slot_mapping` knows."""
    if out_of_range not in ("pad", "error"):
        raise ValueError(f"out_of_range is {out_of_range!r}, expected 'pad' or 'error'")


def slot_mapping(
    block_table: np.ndarray,
    requests: np.ndarray,
    positions: np.ndarray,
    block_size: int,
    *,
    num_blocks: int | None = None,
    out_of_range: str = "error",
) -> np.ndarray:
    """int64 `[T]`: the slot `block * block_size + offset` of every token.

    Args:
        block_table: block ids `[B, columns]` (not slots).
        requests, positions: request and position of each token.
        num_blocks: ids from here on are out of range; None is any id not negative.
        out_of_range: what a position has that the table does not hold: `"pad"` for `PAD_SLOT`,
            or `"error"`. Never another block's slot.

    Raises:
        ValueError: by `out_of_range`, or it is neither of the two.
    """
    require_policy(out_of_range)
    slots = np.full(len(positions), PAD_SLOT, np.int64)
    ids = np.iinfo(np.int64).max if num_blocks is None else num_blocks
    for begin in range(0, len(positions), TOKENS_AT_ONCE):
        part = slice(begin, begin + TOKENS_AT_ONCE)
        known = _fill_slots(
            slots[part], block_table, requests[part], positions[part], block_size, ids
        )
        if out_of_range == "error" and not known.all():
            token = begin + int(np.argmin(known))
            limit = "" if num_blocks is None else f", ids below {num_blocks}"
            raise ValueError(
                f"token {token} of request {int(requests[token])} has position "
                f"{int(positions[token])}, for which its row of block_table has no block "
                f"({block_table.shape[1]} columns of {block_size} tokens{limit})"
            )
    return slots


def _fill_slots(
    slots: np.ndarray,
    block_table: np.ndarray,
    requests: np.ndarray,
    positions: np.ndarray,
    block_size: int,
    num_blocks: int,
) -> np.ndarray:
    """Write the slots of tokens that have one; which those are."""
    columns, offset = np.divmod(positions, block_size)
    known = (positions >= 0) & (columns < block_table.shape[1])
    if block_table.shape[1]:
        blocks = block_table[requests, np.where(known, columns, 0)].astype(np.int64)
        known &= (blocks >= 0) & (blocks < num_blocks)
        np.copyto(slots, blocks * block_size + offset, where=known)
    return known


@dataclass(frozen=True)
class Batch:
    """What the kernels of one step are told of its requests, decodes first.

    Attributes:
        query_start_loc: int32 `[B + 1]`, bounds of the requests' new tokens.
        seq_lens, context_lens: int32 `[B]`, with and without the new tokens; 0 for padding.
        positions, slot_mapping: int64 `[T]`; padding has position 0 and slot `PAD_SLOT`.
        block_table: int32, the requests' rows.
        split: decodes and prefills.
        max_query_len, max_seq_len, max_context_len: host integers.
        num_tokens: tokens that are not padding.
        block_size, parallel, rank: what slots and tables are for, as `plan_batch` was told.
    """

    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    context_lens: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    block_table: np.ndarray
    split: Split
    max_query_len: int
    max_seq_len: int
    max_context_len: int
    num_tokens: int
    block_size: int
    parallel: ContextParallel | None = None
    rank: int = 0


def plan_batch(
    query_lens: Any,
    context_lens: Any,
    block_table: np.ndarray,
    block_size: int,
    *,
    parallel: ContextParallel | None = None,
    rank: int = 0,
    num_blocks: int | None = None,
    decode_threshold: int = 1,
    require_uniform: bool = False,
    is_prefill: Any = None,
    padded_requests: int | None = None,
    padded_tokens: int | None = None,
    out_of_range: str = "error",
) -> Batch:
    """Positions, slots and offsets of a batch that has its decodes first.

    Args:
        query_lens, context_lens: new and cached tokens of each request, `[B]`.
        block_table: int32 block ids `[>= B, columns]`.
        block_size: tokens of a block; with `parallel`, of one rank.
        parallel, rank: how contexts are spread, and whose slots are asked for: tokens of other
            ranks get `PAD_SLOT`.
        padded_requests, padded_tokens: a graph's sizes, at least the batch's own.
        num_blocks, out_of_range: as for `slot_mapping`.
        decode_threshold, require_uniform, is_prefill: as for `split_decodes_and_prefills`.

    Raises:
        TypeError, ValueError: lengths that do not fit together or into int32, a padded size below
            the batch's, or a position out of range.
    """
    query, context = lengths(query_lens, "query_lens"), lengths(context_lens, "context_lens")
    if query.shape != context.shape:
        raise ValueError(f"context_lens has {len(context)} requests, query_lens {len(query)}")
    lengths(query + context, "query_lens + context_lens")
    block_table = block_ids(block_table, len(query))
    positive(block_size=block_size)
    if parallel is not None and parallel.block_size != block_size:
        raise ValueError(f"block_size is {block_size}, but parallel's is {parallel.block_size}")
    split = split_decodes_and_prefills(
        query,
        decode_threshold=decode_threshold,
        require_uniform=require_uniform,
        is_prefill=is_prefill,
    )
    starts = offsets(query)
    tokens = int(starts[-1])
    requests = _padded(padded_requests, len(query), "padded_requests")
    all_tokens = _padded(padded_tokens, tokens, "padded_tokens")
    bounds = np.full(requests + 1, tokens, np.int32)
    bounds[: len(query) + 1] = starts
    seq_lens, context_padded = (np.zeros(requests, np.int32) for _ in range(2))
    seq_lens[: len(query)] = np.where(query > 0, query + context, 0)
    context_padded[: len(query)] = np.where(query > 0, context, 0)
    positions = np.zeros(all_tokens, np.int64)
    positions[:tokens] = token_positions(context, query)
    slots = np.full(all_tokens, PAD_SLOT, np.int64)
    limits = {"num_blocks": num_blocks, "out_of_range": out_of_range}
    places = (block_table, token_requests(query), positions[:tokens])
    if parallel is None:
        slots[:tokens] = slot_mapping(*places, block_size, **limits)
    else:
        slots[:tokens] = parallel.slot_mapping(*places, rank, **limits)
    return Batch(
        query_start_loc=bounds,
        seq_lens=seq_lens,
        context_lens=context_padded,
        positions=positions,
        slot_mapping=slots,
        block_table=block_table[: len(query)],
        split=split,
        max_query_len=int(query.max(initial=0)),
        max_seq_len=int(seq_lens.max(initial=0)),
        max_context_len=int(context_padded.max(initial=0)),
        num_tokens=tokens,
        block_size=block_size,
        parallel=parallel,
        rank=rank,
    )


def _padded(asked: int | None, own: int, name: str) -> int:
    if asked is not None and asked < own:
        raise ValueError(f"{name} is {asked}, but the batch has {own}")
    return own if asked is None else asked


def single_token_rows(
    block_table: np.ndarray, seq_lens: np.ndarray, query_lens: Any
) -> tuple[np.ndarray, np.ndarray]:
    """A block of new tokens that all see each other, as requests of one token each.

    Every row sees the whole sequence, its block's tokens included, so that causality within the
    block is given up: block tables `[T, columns]` and sequence lengths `[T]` are repeated.
    """
    lens = lengths(query_lens, "query_lens")
    return np.repeat(block_table[: len(lens)], lens, axis=0), np.repeat(seq_lens[: len(lens)], lens)
