"""Decode: attention over the latent itself, the up-projections absorbed into query and output."""

from __future__ import annotations

from typing import Any

import numpy as np

from sandbox.kernels import concat_insert_decode
from sandbox.kernels.products import matmul
from sandbox.layers import context_parallel
from sandbox.layers.latent_attention import attend
from sandbox.layers.run import Run, Tokens, by_head
from sandbox.layers.step import DecodeInputs


def decode(run: Run, inputs: DecodeInputs, new: Tokens, out: Any) -> None:
    """Insert the new tokens and attend: `out` `[tokens, N, V]`.

    Per head, `q_nope . (W_UK c) = (q_nope W_UK) . c` and `sum p W_UV c = W_UV (sum p c)`, so that
    keys and values of the context need never be projected.
    """
    layer, dims, tokens = run.layer, run.layer.dims, inputs.tokens
    run.stage("absorb")
    ql_nope = run.array("ql_nope", tokens, dims.N, dims.L)
    matmul(by_head(new.q[..., : dims.P]), layer.w_uk, by_head(ql_nope))
    run.stage("insert")
    coded = layer.decode_q_descale is not None
    query = run.array("latent_q", tokens, dims.N, dims.E, dtype=np.uint8 if coded else layer.dtype)
    run.op(
        concat_insert_decode,
        ql_nope,
        new.q[..., dims.P :] if dims.R else None,
        new.kv_c,
        new.k_pe,
        run.cache,
        new.slot_mapping,
        positions=new.positions,
        q_out=query,
        q_descale=layer.decode_q_descale,
        **run.writing,
    )
    latent = run.array("latent", tokens, dims.N, dims.L)
    if run.step.world_size > 1:
        context_parallel.decode(run, inputs, query, latent)
    else:
        _attend_padded(run, inputs, query, latent)
    run.stage("value projection")
    matmul(by_head(latent), layer.w_uv.swapaxes(1, 2), by_head(out))


def _attend_padded(run: Run, inputs: DecodeInputs, query: Any, latent: Any) -> None:
    """Requests of different numbers of new tokens are padded to the longest at their front."""
    if inputs.places is None:
        attend(run, inputs, query, latent, return_lse=False)
        return
    padded = run.array("padded_q", len(inputs.padded), *query.shape[1:], dtype=query.dtype)
    found = run.array("padded_latent", len(inputs.padded), *latent.shape[1:])
    xp = run.kind.xp
    xp.take(query, inputs.padded, axis=0, out=padded)
    attend(run, inputs, padded, found, return_lse=False)
    xp.take(found, inputs.places, axis=0, out=latent)
