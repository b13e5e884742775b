"""Contexts that are spread over ranks: whole contexts for prefills, partial results for decodes."""

from __future__ import annotations

from typing import Any

import numpy as np

from sandbox import arrays
from sandbox.cache_formats import format_by_name
from sandbox.kernels import dequantize_context, gather, lse_merge_k
from sandbox.layers.latent_attention import attend
from sandbox.layers.run import Run
from sandbox.layers.step import ContextChunk, DecodeInputs

FLOAT32 = np.dtype(np.float32)


def gathered(run: Run, chunk: ContextChunk) -> Any:
    """A chunk's rows of all ranks, in the order of positions, as numbers `[num_keys, L + R]`.

    Ranks exchange the rows as they are stored: packed ones are restored afterwards.
    """
    layer, cache = run.layer, run.cache
    fmt, ranks, width = format_by_name(layer.cache_format), run.step.world_size, cache.shape[2]
    run.stage("gather")
    own = run.array("context_shard", chunk.num_rows, width, dtype=cache.dtype)
    run.op(
        gather,
        cache, chunk.block_table, chunk.row_bounds,
        seq_starts=chunk.starts,
        num_tokens=chunk.num_rows,
        out=own,
        check_values=False,  # the last block of a rank may hold none of its tokens
    )  # fmt: skip
    run.stage("exchange")
    shards = run.array("context_shards", ranks, chunk.num_rows, width, dtype=cache.dtype)
    layer.collective.all_gather(own, shards)
    run.stage("gather")
    stored = run.array("context_stored", chunk.num_keys, width, dtype=cache.dtype)
    flat = shards.reshape(ranks * chunk.num_rows, width)
    run.kind.xp.take(flat, chunk.order, axis=0, out=stored)
    if not fmt.packed:
        return stored
    rows = run.array("context", chunk.num_keys, layer.dims.E)
    run.op(dequantize_context, stored, kv_lora_rank=layer.dims.L, out=rows, **run.reading)
    return rows


def decode(run: Run, inputs: DecodeInputs, query: Any, latent: Any) -> None:
    """Attend over this rank's keys with the heads of all ranks, and merge what all ranks found.

    `query` `[tokens, N, E]` is rotated already; `latent` `[tokens, N, L]` gets this rank's heads.
    """
    layer, ranks = run.layer, run.step.world_size
    tokens, heads, _ = query.shape
    if layer.cp_heads == "replicated":
        partial, lse = _partial(run, inputs, query)
        states = run.array("cp_states", ranks, *partial.shape)
        lses = run.array("cp_lses", ranks, *lse.shape, dtype=FLOAT32)
        run.stage("exchange")
        layer.collective.all_gather(partial, states)
        layer.collective.all_gather(lse, lses)
        _merge(run, states, lses, latent)
        return
    run.stage("exchange")
    gathered_q = run.array("cp_q", ranks, *query.shape, dtype=query.dtype)
    layer.collective.all_gather(query, gathered_q)
    all_q = run.array("cp_all_q", tokens, ranks, heads, query.shape[2], dtype=query.dtype)
    all_q[...] = gathered_q.swapaxes(0, 1)
    flat_q = all_q.reshape(tokens, ranks * heads, query.shape[2])
    partial, lse = _partial(run, inputs, flat_q)
    by_rank = run.array("cp_by_rank", ranks, tokens, heads, layer.dims.L)
    by_rank[...] = partial.reshape(tokens, ranks, heads, layer.dims.L).swapaxes(0, 1)
    lse = lse.reshape(ranks, heads, tokens)
    run.stage("exchange")
    if layer.cp_combine == "reduce_scatter":
        if arrays.capturing(run.kind):
            raise RuntimeError(
                "cp_combine 'reduce_scatter' weighs states in memory that no graph can keep: "
                "capture with 'all_to_all'"
            )
        _weigh(run, by_rank, lse)
        layer.collective.reduce_scatter(by_rank, latent)
        return
    states = run.array("cp_states", *by_rank.shape)
    lses = run.array("cp_lses", *lse.shape, dtype=FLOAT32)
    layer.collective.all_to_all(by_rank, states)
    layer.collective.all_to_all(lse, lses)
    _merge(run, states, lses, latent)


def _partial(run: Run, inputs: DecodeInputs, query: Any) -> tuple[Any, Any]:
    """This rank's keys' part: `[tokens, heads, L]`, and its LSE `[heads, tokens]`."""
    tokens, heads, _ = query.shape
    partial = run.array("cp_partial", tokens, heads, run.layer.dims.L)
    lse = run.array("cp_lse", heads, tokens, dtype=FLOAT32)
    attend(run, inputs, query, partial, out_lse=lse)
    return partial, lse


def _merge(run: Run, states: Any, lses: Any, latent: Any) -> None:
    run.stage("merge")
    run.op(lse_merge_k, states, lses, out=latent, return_lse=False)


def _weigh(run: Run, by_rank: Any, lse: Any) -> None:
    """Multiply this rank's states `[W, tokens, heads, L]` by their share of all ranks' softmax."""
    ranks, xp = run.step.world_size, run.kind.xp
    every = run.array("cp_every_lse", ranks, *lse.shape, dtype=FLOAT32)
    run.layer.collective.all_gather(lse, every)
    top = every.max(axis=0)
    top[xp.isinf(top)] = 0  # of no rank has a key
    share = xp.exp(lse - top) / xp.maximum(xp.exp(every - top).sum(axis=0), FLOAT32.type(1e-30))
    shares = share.swapaxes(1, 2)[..., None]
    by_rank[...] = (by_rank.astype(FLOAT32) * shares).astype(by_rank.dtype)
