"""The oracles of both attentions, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from sandbox import arrays
from sandbox.cache_formats import E4M3, FORMATS, Widths
from sandbox.kernels.attention.checks import CODES
from sandbox.kernels.lse import NATURAL, by_request, by_token

SCORES_AT_ONCE = 1 << 25


def prefill_attention(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    softmax_scale: float,
    causal: bool,
    q_descale: Any,
    k_descale: Any,
    v_descale: Any,
    out: Any,
    out_lse: Any,
    out_dtype: Any,
    return_lse: bool,
    lse_base: str,
    lse_layout: str,
) -> dict[str, Any]:
    """One request at a time, some heads at once."""
    xp = arrays.namespace(q)
    tokens, heads, _ = q.shape
    final = xp.zeros((heads, tokens, v.shape[2]))
    lse = xp.full((heads, tokens), -np.inf)
    bounds_q, bounds_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for first_q, end_q, first_k, end_k in zip(bounds_q, bounds_q[1:], bounds_k, bounds_k[1:]):
        n, m = end_q - first_q, end_k - first_k
        at_once = max(1, SCORES_AT_ONCE // max(1, n * m))
        seen = xp.arange(m) <= m - n + xp.arange(n)[:, None] if causal else None
        for first in range(0, heads, at_once):
            some = slice(first, first + at_once)
            queries, keys, values = (
                _numbers(part[:, some], descale).swapaxes(0, 1)
                for part, descale in (
                    (q[first_q:end_q], q_descale),
                    (k[first_k:end_k], k_descale),
                    (v[first_k:end_k], v_descale),
                )
            )
            scores = softmax_scale * queries @ keys.swapaxes(1, 2)
            weights, found = _softmax(xp, scores, seen)
            final[some, first_q:end_q] = weights @ values
            lse[some, first_q:end_q] = found
    return {
        "out": final.swapaxes(0, 1),
        "out_lse": by_token(lse.T / NATURAL[lse_base], lse_layout),
    }


def decode_attention(
    q: Any,
    cache: Any,
    block_table: Any,
    seq_lens: Any,
    softmax_scale: float,
    kv_lora_rank: int,
    cache_format: str,
    k_scale: Any,
    q_descale: Any,
    causal: bool,
    tree_mask: Any,
    window: int | None,
    indices: Any,
    sink: Any,
    num_splits: int | None,
    deterministic: bool,
    max_seq_len: int | None,
    out: Any,
    out_lse: Any,
    out_dtype: Any,
    return_lse: bool,
    lse_base: str,
    lse_layout: str,
    key_mass: Any,
    return_key_mass: bool,
) -> dict[str, Any]:
    """One softmax a query and head over the rows that some query of a request may see."""
    xp = arrays.namespace(q)
    requests, tokens, heads, width = q.shape
    final = xp.zeros((requests, tokens, heads, kv_lora_rank))
    lse = xp.full((requests, tokens, heads), -np.inf)
    masses = None if key_mass is None else xp.zeros(key_mass.shape)
    if indices is None:
        problems = _paged_keys(cache, block_table, seq_lens, tokens, causal, tree_mask, window)
    else:
        problems = _chosen_keys(cache, indices)
    for request, asked, places, slots, seen in problems:
        rows = cache[slots // cache.shape[1], slots % cache.shape[1]]
        keys = _restored(rows, cache_format, k_scale, kv_lora_rank, width)
        queries = _numbers(q[request, asked], q_descale).swapaxes(0, 1)
        with np.errstate(invalid="ignore"):
            scores = softmax_scale * queries @ keys.T
        weights, found = _softmax(xp, scores, seen)
        if sink is not None:
            weights = weights * _share_beside(xp, sink, found)[..., None]
        final[request, asked] = (weights @ keys[:, :kv_lora_rank]).swapaxes(0, 1)
        lse[request, asked] = found.T
        if masses is not None:
            masses[request, asked][:, places] = weights.sum(axis=0)
    shaped = None
    if out_lse is not None:
        shaped = xp.empty(out_lse.shape)
        by_request(shaped, lse_layout, requests, tokens)[...] = lse / NATURAL[lse_base]
    return {"out": final, "out_lse": shaped, "key_mass": masses}


Keys = tuple[int, slice, Any, Any, Any]
"""A request, its queries in question, their keys' places (positions or entries), slots, and who
sees which, `[queries, keys]`, or None where all see all."""


def _paged_keys(
    cache: Any,
    block_table: Any,
    seq_lens: Any,
    tokens: int,
    causal: bool,
    tree_mask: Any,
    window: int | None,
) -> Iterator[Keys]:
    """Those at the positions of each request that some query sees and that have a block."""
    xp = arrays.namespace(cache)
    if tokens == 0:
        return
    num_blocks, block_size, _ = cache.shape
    room = block_table.shape[1] * block_size
    queries = xp.arange(tokens)[:, None]
    for request, length in enumerate(seq_lens.tolist()):
        positions = xp.arange(min(max(length, 0), room))
        own = length - tokens + queries
        if tree_mask is not None:
            new = positions - (length - tokens)
            words = tree_mask[request][:, xp.maximum(new, 0) // 32]
            seen = (new < 0) | ((words >> (xp.maximum(new, 0) % 32)) & 1 == 1)
        else:
            seen = positions <= own if causal else xp.ones((tokens, len(positions)), bool)
        if window is not None:
            seen = seen & (positions > own - window)
        blocks = block_table[request, positions // block_size].astype(np.int64)
        kept = (blocks >= 0) & (blocks < num_blocks) & seen.any(axis=0)
        places = xp.flatnonzero(kept)
        slots = blocks[places] * block_size + positions[places] % block_size
        yield request, slice(0, tokens), places, slots, seen[:, places]


def _chosen_keys(cache: Any, indices: Any) -> Iterator[Keys]:
    """Those that each query names."""
    xp = arrays.namespace(cache)
    requests, tokens, _ = indices.shape
    for request in range(requests):
        for token in range(tokens):
            chosen = indices[request, token].astype(np.int64)
            places = xp.flatnonzero((chosen >= 0) & (chosen < cache.shape[0] * cache.shape[1]))
            yield request, slice(token, token + 1), places, chosen[places], None


def _restored(rows: Any, cache_format: str, k_scale: Any, L: int, width: int) -> Any:
    fmt = FORMATS[cache_format]
    scale = None if k_scale is None else float(k_scale[0])
    return fmt.decode(rows, Widths(L, width - L), k_scale=scale).astype(np.float64)


def _share_beside(xp: Any, sink: Any, lse: Any) -> Any:
    """What each head's sink `[N]` leaves to keys with LSEs `[N, S]`."""
    with np.errstate(over="ignore"):
        others = xp.exp(sink.astype(np.float64)[:, None] - xp.where(lse == -np.inf, 0.0, lse))
    return 1 / (1 + others)


def _numbers(values: Any, descale: Any) -> Any:
    """Values, or codes times their descale, in float64."""
    if values.dtype == CODES:
        return E4M3.decode(values).astype(np.float64) * float(descale[0])
    return values.astype(np.float64)


def _softmax(xp: Any, scores: Any, seen: Any) -> tuple[Any, Any]:
    """Weights and natural LSE over the last axis; no key seen gives zeros and -inf. `seen` says
    which scores count, None that all do."""
    if not scores.shape[-1]:
        return scores, xp.full(scores.shape[:-1], -np.inf)
    if seen is not None:
        scores = xp.where(seen, scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    weights = xp.exp(scores - xp.where(top == -np.inf, 0.0, top))
    total = weights.sum(axis=-1, keepdims=True)
    empty = total == 0
    divisor = xp.where(empty, 1.0, total)
    return weights / divisor, xp.where(empty, -np.inf, top + xp.log(divisor))[..., 0]
