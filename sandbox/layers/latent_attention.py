"""Attention of decodes' queries over the paged latent, as the step has its keys."""

from __future__ import annotations

from typing import Any

from sandbox.kernels import decode_attention
from sandbox.layers.run import Run
from sandbox.layers.step import DecodeInputs


def attend(run: Run, inputs: DecodeInputs, query: Any, latent: Any, **lse: Any) -> None:
    """Attention over the cache: `query` `[B * S, N, E]` to `latent` `[B * S, N, L]`."""
    layer, dims = run.layer, run.layer.dims
    requests, heads = len(inputs.seq_lens), query.shape[1]
    shape = (requests, inputs.query_len, heads)
    run.stage("decode attention")
    run.op(
        decode_attention,
        query.reshape(*shape, dims.E),
        run.cache,
        inputs.block_table,
        inputs.seq_lens,
        softmax_scale=layer.softmax_scale,
        kv_lora_rank=dims.L,
        q_descale=layer.decode_q_descale,
        causal=inputs.causal,
        tree_mask=inputs.tree_mask,
        deterministic=layer.deterministic,
        max_seq_len=inputs.max_seq_len,
        out=latent.reshape(*shape, dims.L),
        **run.reading,
        **lse,
    )
