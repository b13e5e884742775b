"""Prefill: attention over full heads, of the new tokens and of their context, chunk by chunk."""

from __future__ import annotations

from typing import Any

import numpy as np

from sandbox.kernels import (
    concat_context,
    concat_context_fp8,
    concat_insert_prefill,
    concat_insert_prefill_fp8,
    gather,
    lse_merge,
    prefill_attention,
)
from sandbox.layers import context_parallel
from sandbox.layers.run import Run, Tokens
from sandbox.layers.step import ContextChunk, PrefillInputs

FLOAT32, CODES = np.dtype(np.float32), np.dtype(np.uint8)


def prefill(run: Run, inputs: PrefillInputs, new: Tokens, out: Any) -> None:
    """Insert the new tokens and attend: `out` `[tokens, N, V]`.

    The new tokens' attention among themselves is written to `out` itself; the attention over each
    chunk of context is merged into the rows of `out` that it belongs to.
    """
    q, k, v = _inserted(run, inputs, new)
    lse = None
    if inputs.chunks:
        lse = run.array("lse", run.layer.dims.N, inputs.tokens, dtype=FLOAT32)
    bounds = inputs.query_bounds
    _attend(run, q, k, v, bounds, bounds, causal=True, out=out, out_lse=lse)
    for chunk in inputs.chunks:
        _merge_context(run, chunk, q, out, lse)


def _up_projected(run: Run, kv_c: Any) -> tuple[Any, Any]:
    """Keys without RoPE and values of latents: views `[T, N, P]` and `[T, N, V]` of one array."""
    dims = run.layer.dims
    run.stage("up-projection")
    kv = run.array("kv", len(kv_c), dims.N * (dims.P + dims.V))
    run.project(kv_c, run.layer.weights.kv_b_proj, kv)
    kv = kv.reshape(len(kv_c), dims.N, dims.P + dims.V)
    return kv[..., : dims.P], kv[..., dims.P :]


def _heads(run: Run, name: str, tokens: int, width: int) -> Any:
    dtype = CODES if run.layer.prefill_descales else run.layer.dtype
    return run.array(name, tokens, run.layer.dims.N, width, dtype=dtype)


def _inserted(run: Run, inputs: PrefillInputs, new: Tokens) -> tuple[Any, Any, Any]:
    """Cache rows of the new tokens, and their q, k and v for attention: E4M3 codes, if asked."""
    dims, descales = run.layer.dims, run.layer.prefill_descales
    k_nope, v = _up_projected(run, new.kv_c)
    run.stage("insert")
    k = _heads(run, "k", inputs.tokens, dims.qk_head_dim)
    common = {"positions": new.positions, "k_out": k, **run.writing}
    if descales is None:
        run.op(
            concat_insert_prefill,
            new.q, k_nope, new.k_pe, new.kv_c, run.cache, new.slot_mapping,
            q_out=new.q,
            **common,
        )  # fmt: skip
        return new.q, k, v
    q = _heads(run, "q_codes", inputs.tokens, dims.qk_head_dim)
    v_codes = _heads(run, "v_codes", inputs.tokens, dims.V)
    run.op(
        concat_insert_prefill_fp8,
        new.q, k_nope, v, new.k_pe, new.kv_c, run.cache, new.slot_mapping,
        **dict(zip(("q_descale", "k_descale", "v_descale"), descales)),
        q_out=q,
        v_out=v_codes,
        **common,
    )  # fmt: skip
    return q, k, v_codes


def _attend(
    run: Run,
    q: Any,
    k: Any,
    v: Any,
    query_bounds: Any,
    key_bounds: Any,
    *,
    causal: bool,
    out: Any,
    out_lse: Any,
) -> None:
    run.stage("prefill attention")
    descales = run.layer.prefill_descales or (None, None, None)
    run.op(
        prefill_attention,
        q, k, v, query_bounds, key_bounds,
        softmax_scale=run.layer.softmax_scale,
        causal=causal,
        **dict(zip(("q_descale", "k_descale", "v_descale"), descales)),
        out=out,
        out_lse=out_lse,
        return_lse=out_lse is not None,
    )  # fmt: skip


def _merge_context(run: Run, chunk: ContextChunk, q: Any, out: Any, lse: Any) -> None:
    """Attend over one chunk and merge the result, in place, into its tokens' rows of `out`."""
    dims, descales = run.layer.dims, run.layer.prefill_descales
    rows = _gathered(run, chunk)
    k_nope, v = _up_projected(run, rows[:, : dims.L])
    run.stage("concat")
    k_pe = rows[:, dims.L :] if dims.R else None
    k = _heads(run, "k", chunk.num_keys, dims.qk_head_dim)
    if descales is None:
        run.op(concat_context, k_nope, k_pe, k_out=k)
    else:
        v_codes = _heads(run, "v_codes", chunk.num_keys, dims.V)
        scales = {"k_descale": descales[1], "v_descale": descales[2]}
        run.op(concat_context_fp8, k_nope, k_pe, v, **scales, k_out=k, v_out=v_codes)
        v = v_codes
    part = chunk.tokens
    tokens = part.stop - part.start
    partial = run.array("partial", tokens, dims.N, dims.V)
    partial_lse = run.array("partial_lse", dims.N, tokens, dtype=FLOAT32)
    bounds = (chunk.query_bounds, chunk.key_bounds)
    _attend(run, q[part], k, v, *bounds, causal=False, out=partial, out_lse=partial_lse)
    run.stage("merge")
    whole, whole_lse = out[part], lse[:, part]
    run.op(
        lse_merge,
        partial, partial_lse, whole, whole_lse,
        out=whole,
        out_lse=whole_lse,
    )  # fmt: skip


def _gathered(run: Run, chunk: ContextChunk) -> Any:
    """The chunk's cache rows as numbers, `[num_keys, L + R]`."""
    if chunk.order is not None:
        return context_parallel.gathered(run, chunk)
    run.stage("gather")
    dims = run.layer.dims
    rows = run.array("context", chunk.num_rows, dims.E)
    run.op(
        gather,
        run.cache, chunk.block_table, chunk.row_bounds,
        seq_starts=chunk.starts,
        num_tokens=chunk.num_rows,
        out=rows,
        kv_lora_rank=dims.L,
        **run.reading,
    )  # fmt: skip
    return rows
