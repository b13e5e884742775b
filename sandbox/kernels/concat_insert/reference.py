"""The oracles: rotation in float64, rounded once, to bits or codes; all else copied or encoded."""

from __future__ import annotations

from typing import Any

import numpy as np

from sandbox import arrays
from sandbox.cache_formats import E4M3, FORMATS, Widths


def concat_insert(
    kv_c: Any,
    k_pe: Any,
    cache: Any,
    slot_mapping: Any,
    cache_format: str,
    k_scale: Any,
    tile_scale: str | None,
) -> dict[str, Any]:
    """Every row looked up by itself: slot, block, row. `k_pe` may be float64."""
    xp = arrays.namespace(cache)
    num_blocks, block_size, _ = cache.shape
    final = cache.copy()
    kept = xp.flatnonzero((slot_mapping >= 0) & (slot_mapping < num_blocks * block_size))
    slots = slot_mapping[kept]
    fmt, widths = FORMATS[cache_format], Widths(kv_c.shape[1], k_pe.shape[1])
    if fmt.packed:
        rows = xp.concatenate([kv_c[kept].astype(np.float32), k_pe[kept].astype(np.float32)], -1)
        scale = None if k_scale is None else float(k_scale[0])
        rows = fmt.encode(rows, widths, k_scale=scale, tile_scale=tile_scale)
    else:
        rows = xp.concatenate([kv_c[kept], k_pe[kept].astype(cache.dtype)], axis=-1)
    final[slots // block_size, slots % block_size] = rows
    return {"cache": final}


def rope(x: Any, positions: Any, cos_sin: Any) -> Any:
    """Pairs (2i, 2i + 1) of x `[T, ..., R]` turned by the angles of its token's position.

    In float64, or, without positions, x as it is. A position that the table does not have gives
    NaN.
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
    with np.errstate(invalid="ignore"):
        turned[..., 0::2] = even * cosine - odd * sine
        turned[..., 1::2] = even * sine + odd * cosine
    return turned


def concat_insert_prefill(
    q: Any,
    k_nope: Any,
    k_pe: Any,
    kv_c: Any,
    slot_mapping: Any,
    positions: Any,
    cos_sin: Any,
    q_out: Any,
    k_out: Any,
    **row: Any,
) -> dict[str, Any]:
    """Row by row of the three outputs."""
    tokens, nope = slot_mapping.shape[0], k_nope.shape[2]
    positions = positions[:tokens] if positions is not None else None
    key = rope(k_pe[:tokens], positions, cos_sin)
    final_q, final_k = q_out.copy(), k_out.copy()
    final_q[:tokens, :, :nope] = q[:tokens, :, :nope]
    final_q[:tokens, :, nope:] = rope(q[:tokens, :, nope:], positions, cos_sin).astype(q.dtype)
    final_k[:tokens, :, :nope] = k_nope[:tokens]
    final_k[:tokens, :, nope:] = key[:, None].astype(q.dtype)
    inserted = concat_insert(kv_c[:tokens], key, slot_mapping=slot_mapping, **row)
    return {"q_out": final_q, "k_out": final_k, **inserted}


def concat_insert_prefill_fp8(
    q: Any,
    k_nope: Any,
    v: Any,
    k_pe: Any,
    kv_c: Any,
    slot_mapping: Any,
    q_descale: Any,
    k_descale: Any,
    v_descale: Any,
    positions: Any,
    cos_sin: Any,
    q_out: Any,
    k_out: Any,
    v_out: Any,
    **row: Any,
) -> dict[str, Any]:
    """Row by row of the four outputs."""
    tokens, nope = slot_mapping.shape[0], k_nope.shape[2]
    positions = positions[:tokens] if positions is not None else None
    key = rope(k_pe[:tokens], positions, cos_sin)
    final_q, final_k, final_v = q_out.copy(), k_out.copy(), v_out.copy()
    final_q[:tokens, :, :nope] = E4M3.quantize(q[:tokens, :, :nope], q_descale)
    final_q[:tokens, :, nope:] = E4M3.quantize(
        rope(q[:tokens, :, nope:], positions, cos_sin), q_descale
    )
    final_k[:tokens, :, :nope] = E4M3.quantize(k_nope[:tokens], k_descale)
    final_k[:tokens, :, nope:] = E4M3.quantize(key, k_descale)[:, None]
    final_v[:tokens] = E4M3.quantize(v[:tokens], v_descale)
    inserted = concat_insert(kv_c[:tokens], key, slot_mapping=slot_mapping, **row)
    return {"q_out": final_q, "k_out": final_k, "v_out": final_v, **inserted}


def concat_insert_decode(
    ql_nope: Any,
    q_pe: Any,
    kv_c: Any,
    k_pe: Any,
    slot_mapping: Any,
    positions: Any,
    cos_sin: Any,
    q_out: Any,
    q_descale: Any,
    **row: Any,
) -> dict[str, Any]:
    """Row by row of the two outputs."""
    tokens, latent = slot_mapping.shape[0], kv_c.shape[1]
    positions = positions[:tokens] if positions is not None else None
    final = q_out.copy()
    turned = rope(q_pe[:tokens], positions, cos_sin)
    if q_descale is None:
        final[:tokens, :, :latent] = ql_nope[:tokens]
        final[:tokens, :, latent:] = turned.astype(final.dtype)
    else:
        final[:tokens, :, :latent] = E4M3.quantize(ql_nope[:tokens], q_descale)
        final[:tokens, :, latent:] = E4M3.quantize(turned, q_descale)
    key = rope(k_pe[:tokens], positions, cos_sin)
    inserted = concat_insert(kv_c[:tokens], key, slot_mapping=slot_mapping, **row)
    return {"q_out": final, **inserted}
