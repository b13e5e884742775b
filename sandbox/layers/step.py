"""What the layers of a model read of a step's plan, moved to the device in one copy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np

from sandbox import arrays
from sandbox.planner import PAD_SLOT, ContextParallel, DecodePlanner, Packed, Plan, pack
from sandbox.planner.batch import offsets


@dataclass(frozen=True)
class DecodeInputs:
    """The decodes of a step: `B` requests of `S` new tokens each, padded at their front.

    Attributes:
        tokens: of all requests, without padding.
        query_len: `S`.
        block_table: int32 `[B, columns]`.
        seq_lens: int32 `[B]`, keys on this rank, new tokens included.
        padded: int64 `[B * S]`, the token at each place (any, where it is padding); None where
            requests have `S` tokens each.
        places: int64 `[tokens]`, the place of each token; None likewise.
        causal: whether a query sees later tokens of its request.
        tree_mask: as for `decode_attention`.
        max_seq_len: no `seq_len` is larger; None is all that the table has room for.
        padding: int32 `[B]`, 1 for requests that are none; None where all are some.
    """

    tokens: int
    query_len: int
    block_table: Any
    seq_lens: Any
    padded: Any = None
    places: Any = None
    causal: bool = True
    tree_mask: Any = None
    max_seq_len: int | None = None
    padding: Any = None


@dataclass(frozen=True)
class ContextChunk:
    """A part of the prefills' context that is gathered at once.

    Attributes:
        tokens: slice of the prefills' new tokens that attend to it.
        block_table: int32 `[B, columns]`, of its requests.
        starts: int32 `[B]`, first row of each request, among those of this rank.
        row_bounds, num_rows: int32 `[B + 1]`, rows of each request that this rank gathers.
        query_bounds: int32 `[B + 1]`, new tokens of each request, from 0.
        key_bounds, num_keys: int32 `[B + 1]`, keys of each request, of all ranks.
        order: int64 `[num_keys]`, where the keys are among the rows of all ranks; None where they
            are the rows.
    """

    tokens: slice
    block_table: Any
    starts: Any
    row_bounds: Any
    num_rows: int
    query_bounds: Any
    key_bounds: Any
    num_keys: int
    order: Any = None


@dataclass(frozen=True)
class PrefillInputs:
    """The prefills of a step: bounds of their new tokens, from 0, and their context."""

    tokens: int
    query_bounds: Any
    chunks: tuple[ContextChunk, ...]


@dataclass(frozen=True)
class Step:
    """One step of a batch, decodes first, for any number of layers. Made by `prepare`.

    Attributes:
        num_tokens: tokens that are computed; what a caller passes beyond is padding.
        positions, slot_mapping: int64 `[num_tokens]`.
        decode, prefill: None where the batch has none.
        world_size: ranks that the context is spread over.
    """

    num_tokens: int
    positions: Any
    slot_mapping: Any
    decode: DecodeInputs | None
    prefill: PrefillInputs | None
    world_size: int = 1


def prepare(
    plan: Plan,
    *,
    like: Any = None,
    parallel: ContextParallel | None = None,
    rank: int = 0,
    causal: bool = True,
    tree_mask: Any = None,
) -> Step:
    """What layers read of `plan`, on the device of `like`, in one copy.

    Args:
        plan: made with the same `parallel` and `rank`.
        like: an array of any kind on the device where the step will run; None is the CPU.
        parallel, rank: how contexts are spread over ranks, and which one this is.
        causal: whether decodes of several new tokens see only earlier ones.
        tree_mask: int32 `[decodes, S, ceil(S / 32)]` in CPU memory, as for `decode_attention`; all
            decodes have `S` new tokens then.

    Raises:
        ValueError: a tree mask that does not fit, or beside context parallelism.
    """
    batch = plan.batch
    first = int(batch.query_start_loc[batch.split.num_decodes])
    decode = _decode(plan, first, parallel, rank, causal) if first else None
    if tree_mask is not None:
        decode = _with_tree(decode, tree_mask, causal, parallel)
    step = Step(
        num_tokens=batch.num_tokens,
        positions=batch.positions[: batch.num_tokens],
        slot_mapping=batch.slot_mapping[: batch.num_tokens],
        decode=decode,
        prefill=_prefill(plan, first, parallel) if batch.num_tokens > first else None,
        world_size=1 if parallel is None else parallel.world_size,
    )
    return step if like is None else moved(step, like)


def moved(step: Step, like: Any) -> Step:
    """A step of NumPy arrays on the device of `like`, in one copy."""
    with arrays.borrow({"like": like}) as borrowed:
        if borrowed.xp is np:
            return step
        return _placed(step, _packed(step).moved(borrowed.xp.asarray))


def _packed(step: Step) -> Packed:
    return pack({str(place): leaf for place, leaf in enumerate(_leaves(step))})


def _placed(step: Step, packed: Packed) -> Step:
    """The step with its arrays in `packed`, which `_packed` made of it or of one alike."""
    return _with_leaves(step, iter([packed[name] for name in packed.places]))


def _leaves(value: Any) -> Iterator[np.ndarray]:
    """The arrays in a dataclass, its dataclasses and tuples of such, in order."""
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from _leaves(each)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _leaves(getattr(value, field.name))


def _with_leaves(value: Any, leaves: Iterator[Any]) -> Any:
    """`value` with other arrays, in the order of `_leaves`."""
    if isinstance(value, np.ndarray):
        return next(leaves)
    if isinstance(value, tuple):
        return tuple(_with_leaves(each, leaves) for each in value)
    if is_dataclass(value):
        named = {f.name: _with_leaves(getattr(value, f.name), leaves) for f in fields(value)}
        return replace(value, **named)
    return value


def _decode(
    plan: Plan, tokens: int, parallel: ContextParallel | None, rank: int, causal: bool
) -> DecodeInputs:
    batch, decodes = plan.batch, plan.batch.split.num_decodes
    lens = np.diff(batch.query_start_loc[: decodes + 1]).astype(np.int64)
    table, seq_lens = batch.block_table[:decodes], batch.seq_lens[:decodes]
    if parallel is not None:
        request = np.repeat(np.arange(decodes), lens)
        seen = batch.positions[:tokens] + 1 if causal else seq_lens[request]
        local = parallel.local_lens(seen, rank).astype(np.int32)
        return DecodeInputs(tokens, 1, table[request], local, max_seq_len=int(local.max()))
    longest = int(lens.max())
    places: dict[str, np.ndarray] = {}
    if (lens != longest).any():
        front = (longest - lens)[:, None]
        token = batch.query_start_loc[:decodes, None] + np.arange(longest) - front
        places["padded"] = np.clip(token, 0, tokens - 1).astype(np.int64).reshape(-1)
        places["places"] = np.flatnonzero(np.arange(longest) >= front)
    return DecodeInputs(
        tokens, longest, table, seq_lens, **places,
        causal=causal, max_seq_len=int(seq_lens.max()),
    )  # fmt: skip


def _with_tree(
    decode: DecodeInputs | None, tree_mask: Any, causal: bool, parallel: ContextParallel | None
) -> DecodeInputs:
    if decode is None:
        raise ValueError("tree_mask is given, but the step has no decodes")
    if parallel is not None:
        raise ValueError("tree_mask is given, but no rank of a spread context has all its keys")
    if not causal:
        raise ValueError("tree_mask is given, but causal is False: one or the other")
    if decode.places is not None:
        raise ValueError("tree_mask is given, but decodes have different numbers of new tokens")
    return replace(decode, tree_mask=np.asarray(tree_mask))


def _prefill(plan: Plan, first: int, parallel: ContextParallel | None) -> PrefillInputs:
    batch, context = plan.batch, plan.context
    bounds = batch.query_start_loc[batch.split.num_decodes : len(batch.block_table) + 1]
    rows = context.padding.needed(context.pieces.length)
    chunks = []
    for chunk, pieces in zip(context.chunks(), _chunk_pieces(plan)):
        start, length = context.pieces.start[pieces], context.pieces.length[pieces]
        prefills = slice(
            batch.split.num_decodes + chunk.requests.start,
            batch.split.num_decodes + chunk.requests.stop,
        )
        row_bounds = offsets(rows[pieces])
        chunks.append(
            ContextChunk(
                tokens=chunk.tokens,
                block_table=batch.block_table[prefills],
                starts=context.padding.before(start).astype(np.int32),
                row_bounds=row_bounds,
                num_rows=int(row_bounds[-1]),
                query_bounds=chunk.query_start_loc,
                key_bounds=offsets(length),
                num_keys=chunk.num_context_tokens,
                order=None if parallel is None else parallel.reorganise(start, length),
            )
        )
    return PrefillInputs(batch.num_tokens - first, bounds - bounds[0], tuple(chunks))


def _chunk_pieces(plan: Plan) -> list[slice]:
    bounds = plan.context.pieces.bounds.tolist()
    return [slice(begin, end) for begin, end in itertools.pairwise(bounds)]


class DecodeSteps:
    """The inputs of decode steps at fixed addresses, for a captured graph.

    Capture a layer's call with `step`; before every replay, call `update`. A padded request has
    `seq_lens` 0 and slot -1: it reads no key, writes no row, and its output is 0.

    Args:
        max_requests, query_len, block_size, num_blocks: as for `DecodePlanner`.
        columns: of the block table.
        like: an array of any kind on the device where the graph will run; None is the CPU.
        parallel, rank: how contexts are spread over ranks, and which one this is; `block_size` is
            that of one rank.
        causal: whether several new tokens of a request see only earlier ones.
    """

    def __init__(
        self,
        max_requests: int,
        query_len: int = 1,
        *,
        columns: int,
        block_size: int,
        num_blocks: int | None = None,
        like: Any = None,
        parallel: ContextParallel | None = None,
        rank: int = 0,
        causal: bool = True,
    ) -> None:
        self._planner = DecodePlanner(
            max_requests, query_len, block_size=block_size, num_blocks=num_blocks
        )
        self._parallel, self._rank, self._causal = parallel, rank, causal
        tokens = max_requests * query_len
        rows, width = (max_requests, query_len) if parallel is None else (tokens, 1)
        table, seq_lens = np.zeros((rows, columns), np.int32), np.zeros(rows, np.int32)
        blank = Step(
            num_tokens=tokens,
            positions=np.zeros(tokens, np.int64),
            slot_mapping=np.full(tokens, PAD_SLOT, np.int64),
            decode=DecodeInputs(
                tokens, width, table, seq_lens, causal=causal, padding=np.ones(rows, np.int32)
            ),
            prefill=None,
            world_size=1 if parallel is None else parallel.world_size,
        )
        self._packed = _packed(blank)
        self._host = _placed(blank, self._packed)
        self._like = like
        with arrays.borrow({"like": like}) as borrowed:
            on_device = self._packed.moved(borrowed.xp.asarray)
        self._buffer = on_device.buffer
        self.step = _placed(blank, on_device)

    def update(self, context_lens: Any, block_table: np.ndarray) -> Step:
        """Plan the decodes of requests with so many cached tokens; the others are padding.

        Args:
            context_lens: integers `[B]`, `B <= max_requests`.
            block_table: int32 `[>= B, columns]`, contiguous, of block ids.

        Returns:
            `step`, whose arrays are written on the current stream of the library of `like`.

        Raises:
            TypeError, ValueError: as `DecodePlanner.plan`, or a table of other columns.
        """
        host, columns = self._host, self._host.decode.block_table.shape[1]
        if block_table.ndim != 2 or block_table.shape[1] != columns:
            raise ValueError(
                f"block_table has shape {block_table.shape}, expected {columns} columns"
            )
        planned = self._planner.plan(context_lens, block_table)
        requests, query_len = len(context_lens), self._planner.query_len
        tokens = requests * query_len
        host.positions[...] = planned["positions"]
        host.decode.padding[...] = 1
        host.decode.padding[: requests if self._parallel is None else tokens] = 0
        if self._parallel is None:
            host.slot_mapping[...] = planned["slot_mapping"]
            host.decode.block_table[:requests] = block_table[:requests]
            host.decode.seq_lens[...] = planned["seq_lens"]
        else:
            request = np.repeat(np.arange(requests), query_len)
            positions = planned["positions"][:tokens]
            host.slot_mapping[...] = PAD_SLOT
            host.slot_mapping[:tokens] = self._parallel.slot_mapping(
                block_table, request, positions, self._rank,
                num_blocks=self._planner.num_blocks, out_of_range="pad",
            )  # fmt: skip
            host.decode.block_table[:tokens] = block_table[request]
            seen = positions + 1 if self._causal else planned["seq_lens"][request]
            host.decode.seq_lens[...] = 0
            host.decode.seq_lens[:tokens] = self._parallel.local_lens(seen, self._rank)
        if self._buffer is not self._packed.buffer:
            with arrays.borrow({"like": self._like}):
                self._buffer.set(self._packed.buffer)
        return self.step
