"""What the layers of a model read of a step's batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np

from sandbox import arrays
from sandbox.planner import ContextParallel, Packed, pack


@dataclass(frozen=True, eq=False)
class DecodeInputs:
    """The decodes of a step: `B` requests of `S` new tokens each, padded at their front.

    Attributes:
        tokens: of all requests.
        query_len: `S`.
        block_table: int32 `[B, columns]`.
        seq_lens: int32 `[B]`, keys on this rank, new tokens included.
        padded: int64 `[B * S]`, the token at each place (any, where there is none); None where
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


@dataclass(frozen=True, eq=False)
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


@dataclass(frozen=True, eq=False)
class PrefillInputs:
    """The prefills of a step: bounds of their new tokens, from 0, and their context."""

    tokens: int
    query_bounds: Any
    chunks: tuple[ContextChunk, ...]


@dataclass(frozen=True, eq=False)
class Step:
    """One step of a batch, decodes first, for any number of layers. Made by `prepare`.

    Attributes:
        num_tokens: tokens that are computed; what a caller passes beyond is padding.
        positions, slot_mapping: int64 `[num_tokens]`.
        decode, prefill: None where the batch has none.
        block_size: rows of a block of the cache.
        parallel, rank: how contexts are spread over ranks, and which one this is.
    """

    num_tokens: int
    positions: Any
    slot_mapping: Any
    decode: DecodeInputs | None
    prefill: PrefillInputs | None
    block_size: int
    parallel: ContextParallel | None = None
    rank: int = 0

    @property
    def world_size(self) -> int:
        return 1 if self.parallel is None else self.parallel.world_size


def moved(step: Step, like: Any) -> Step:
    """A step of NumPy arrays on the device of `like`, in one copy; None is the CPU."""
    if like is None or arrays.exporter(like, "like").gpu is None:
        return step
    return placed(step, on_device(packed(step), like))


def on_device(buffer: Packed, like: Any) -> Packed:
    """The arrays of `buffer` on the device of `like`, in one copy; on a CPU where they are."""
    if like is None:
        return buffer
    arrays.exporter(like, "like")
    with arrays.borrow({"like": like}) as borrowed:
        return buffer.moved(borrowed.xp.asarray)


def packed(step: Step) -> Packed:
    """The step's arrays in one buffer."""
    return pack({str(place): leaf for place, leaf in enumerate(_leaves(step))})


def placed(step: Step, buffer: Packed) -> Step:
    """The step with its arrays in `buffer`, which `packed` made of it or of one alike."""
    return _with_leaves(step, iter([buffer[name] for name in buffer.places]))


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
