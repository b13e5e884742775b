"""A plan as the layers of a model read it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from sandbox.layers.step import ContextChunk, DecodeInputs, PrefillInputs, Step, moved
from sandbox.planner import Plan
from sandbox.planner.batch import Batch, offsets

MOST_PADDING = 2
"""Decodes of different lengths are padded up to so many places a token, else taken one by one."""


def prepare(plan: Plan, *, like: Any = None, causal: bool = True, tree_mask: Any = None) -> Step:
    """What layers read of `plan`, on the device of `like`, in one copy.

    Args:
        plan: of `plan_step`.
        like: an array of any kind on the device where the step will run; None is the CPU.
        causal: whether decodes of several new tokens see only earlier ones.
        tree_mask: int32 `[decodes, S, ceil(S / 32)]` in CPU memory, as for `decode_attention`; all
            decodes have `S` new tokens then. Their places in a sequence are those of the plan; if
            a tree's branches are to have the positions of its depths, pass these to the layer.

    Raises:
        TypeError, ValueError: `like` is no array; a tree mask that does not fit, or beside context
            parallelism; or a plan whose contexts are padded (`plan_step(padding=...)`) and not
            spread over ranks.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"plan is {type(plan).__name__}, expected a Plan of plan_step")
    batch = plan.batch
    spread = batch.parallel is not None
    if not spread and (plan.context.padding.tokens, plan.context.padding.rows) != (1, 1):
        raise ValueError("plan pads contexts in the workspace, which layers do not expect")
    first = int(batch.query_start_loc[batch.split.num_decodes])
    decode = _decode(batch, first, causal) if first else None
    if tree_mask is not None:
        decode = _with_tree(decode, batch, np.asarray(tree_mask), causal)
    step = Step(
        num_tokens=batch.num_tokens,
        positions=batch.positions[: batch.num_tokens],
        slot_mapping=batch.slot_mapping[: batch.num_tokens],
        decode=decode,
        prefill=_prefill(plan, first) if batch.num_tokens > first else None,
        block_size=batch.block_size,
        parallel=batch.parallel,
        rank=batch.rank,
    )
    return moved(step, like)


def _decode(batch: Batch, tokens: int, causal: bool) -> DecodeInputs:
    bounds = batch.query_start_loc[: batch.split.num_decodes + 1]
    lens = np.diff(bounds).astype(np.int64)
    live = np.flatnonzero(lens)
    lens, starts = lens[live], bounds[live]
    table, seq_lens = batch.block_table[live], batch.seq_lens[live]
    longest = int(lens.max())
    if batch.parallel is not None or longest * len(live) > MOST_PADDING * tokens:
        request = np.repeat(np.arange(len(live)), lens)
        seen = batch.positions[:tokens] + 1 if causal else seq_lens[request]
        if batch.parallel is not None:
            seen = batch.parallel.local_lens(seen, batch.rank)
        return DecodeInputs(
            tokens, 1, table[request], seen.astype(np.int32), max_seq_len=int(seen.max())
        )
    places: dict[str, np.ndarray] = {}
    if (lens != longest).any():
        front = (longest - lens)[:, None]
        token = starts[:, None] + np.arange(longest) - front
        places["padded"] = np.maximum(token, 0).astype(np.int64).reshape(-1)
        places["places"] = np.flatnonzero(np.arange(longest) >= front)
    return DecodeInputs(
        tokens, longest, table, seq_lens, **places,
        causal=causal, max_seq_len=int(seq_lens.max()),
    )  # fmt: skip


def _with_tree(
    decode: DecodeInputs | None, batch: Batch, tree_mask: np.ndarray, causal: bool
) -> DecodeInputs:
    if decode is None:
        raise ValueError("tree_mask is given, but the step has no decodes")
    if batch.parallel is not None:
        raise ValueError("tree_mask is given, but no rank of a spread context has all its keys")
    if not causal:
        raise ValueError("tree_mask is given, but causal is False: one or the other")
    decodes = batch.split.num_decodes
    lens = np.diff(batch.query_start_loc[: decodes + 1])
    if (lens != lens[0]).any():
        raise ValueError("tree_mask is given, but decodes have different numbers of new tokens")
    shape = (decodes, int(lens[0]), -(-int(lens[0]) // 32))
    if tree_mask.dtype != np.int32:
        raise TypeError(f"tree_mask is {tree_mask.dtype}, expected int32")
    if tree_mask.shape != shape:
        raise ValueError(f"tree_mask has shape {tree_mask.shape}, expected {shape}")
    return replace(decode, tree_mask=tree_mask)


def _prefill(plan: Plan, first: int) -> PrefillInputs:
    batch, context = plan.batch, plan.context
    decodes, pieces = batch.split.num_decodes, context.pieces
    bounds = batch.query_start_loc[decodes : len(batch.block_table) + 1]
    chunks = []
    for number, chunk in enumerate(context.chunks()):
        of_chunk, _ = plan.chunk_slices(number)
        start, length = pieces.start[of_chunk], pieces.length[of_chunk]
        prefills = slice(decodes + chunk.requests.start, decodes + chunk.requests.stop)
        order = None
        if batch.parallel is not None:
            order = batch.parallel.reorganise(start, length)
        chunks.append(
            ContextChunk(
                tokens=chunk.tokens,
                block_table=batch.block_table[prefills],
                starts=context.padding.before(start).astype(np.int32),
                row_bounds=chunk.cu_seq_lens,
                num_rows=int(chunk.cu_seq_lens[-1]),
                query_bounds=chunk.query_start_loc,
                key_bounds=offsets(length),
                num_keys=chunk.num_context_tokens,
                order=order,
            )
        )
    return PrefillInputs(batch.num_tokens - first, bounds - bounds[0], tuple(chunks))
