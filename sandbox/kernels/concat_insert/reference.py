"""The oracles: rotation in float64, rounded once; everything else is copied."""

from __future__ import annotations

from typing import Any

import numpy as np

from sandbox import arrays


def concat_insert(kv_c: Any, k_pe: Any, cache: Any, slot_mapping: Any) -> dict[str, Any]:
    """Every row looked up by itself: slot, block, row."""
    xp = arrays.namespace(cache)
    num_blocks, block_size, _ = cache.shape
    final = cache.copy()
    kept = xp.flatnonzero((slot_mapping >= 0) & (slot_mapping < num_blocks * block_size))
    slots = slot_mapping[kept]
    rows = xp.concatenate([kv_c[kept], k_pe[kept]], axis=-1)
    final[slots // block_size, slots % block_size] = rows
    return {"cache": final}


def rope(x: Any, positions: Any, cos_sin: Any) -> Any:
    """Pairs (2i, 2i + 1) of x `[T, ..., R]` turned by the angles of its token's position.

    Without positions x as it is. A position that the table does not have gives NaN.
    """
    if positions is None:
        return x
    xp = arrays.namespace(x)
    known = (positions >= 0) & (positions < cos_sin.shape[0])
    angles = xp.full((x.shape[0], x.shape[-1]), np.nan)
    angles[known] = cos_sin[positions[known]]
    angles = angles.reshape(x.shape[0], *[1] * (x.ndim - 2), x.shape[-1])
    half = x.shape[-1] // 2
    cosine, sine = angles[..., :half], angles[..., half:]
    even, odd = (x[..., start::2].astype(np.float64) for start in (0, 1))
    turned = xp.empty(x.shape)
    turned[..., 0::2] = even * cosine - odd * sine
    turned[..., 1::2] = even * sine + odd * cosine
    return turned.astype(x.dtype)


def concat_insert_prefill(
    q: Any,
    k_nope: Any,
    k_pe: Any,
    kv_c: Any,
    cache: Any,
    slot_mapping: Any,
    positions: Any,
    cos_sin: Any,
    q_out: Any,
    k_out: Any,
) -> dict[str, Any]:
    """Row by row of the three outputs."""
    tokens, nope = slot_mapping.shape[0], k_nope.shape[2]
    positions = positions[:tokens] if positions is not None else None
    key = rope(k_pe[:tokens], positions, cos_sin)
    final_q, final_k = q_out.copy(), k_out.copy()
    final_q[:tokens, :, :nope] = q[:tokens, :, :nope]
    final_q[:tokens, :, nope:] = rope(q[:tokens, :, nope:], positions, cos_sin)
    final_k[:tokens, :, :nope] = k_nope[:tokens]
    final_k[:tokens, :, nope:] = key[:, None]
    inserted = concat_insert(kv_c[:tokens], key, cache, slot_mapping)
    return {"q_out": final_q, "k_out": final_k, **inserted}


def concat_insert_decode(
    ql_nope: Any,
    q_pe: Any,
    kv_c: Any,
    k_pe: Any,
    cache: Any,
    slot_mapping: Any,
    positions: Any,
    cos_sin: Any,
    q_out: Any,
) -> dict[str, Any]:
    """Row by row of the two outputs."""
    tokens, latent = slot_mapping.shape[0], kv_c.shape[1]
    positions = positions[:tokens] if positions is not None else None
    final = q_out.copy()
    final[:tokens, :, :latent] = ql_nope[:tokens]
    final[:tokens, :, latent:] = rope(q_pe[:tokens], positions, cos_sin)
    key = rope(k_pe[:tokens], positions, cos_sin)
    return {"q_out": final, **concat_insert(kv_c[:tokens], key, cache, slot_mapping)}
