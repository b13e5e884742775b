"""What a layer's step should give, by plain products over the values that its cache restores to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.layer_problems import Inputs
from sandbox.layers.model_config import NORM_EPS

SCORES_AT_ONCE = 1 << 28


@dataclass(frozen=True)
class Expected:
    """What a step should give, in float64 on a CPU, in float32 on a GPU.

    Attributes:
        out: `[T, H]`.
        rows: the new tokens' latent rows `[T, L + R]`, not yet rounded or encoded.
        by_codes: `[T, H]`, what a decode's output owes to the codes of the token's own row: a value
            next to the border of two codes may get either. None where no row is restored.
    """

    out: Any
    rows: Any
    by_codes: Any = None


def expected(inputs: Inputs) -> Expected:
    """The step by the definition of MLA: no op and no layer of ours takes part."""
    problem, xp = inputs.problem, inputs.xp
    dims, shape = problem.dims, problem.shape
    numbers = np.float64 if xp is np else np.float32

    def times(x: Any, name: str) -> Any:
        return x @ inputs.weights[f"{name}.weight"].astype(numbers).T

    def normed(x: Any, name: str) -> Any:
        mean = (x * x).mean(axis=-1, keepdims=True)
        weight = inputs.weights[f"{name}.weight"].astype(numbers)
        return x / xp.sqrt(mean + NORM_EPS) * weight

    hidden = inputs.hidden.astype(numbers)
    if dims.q_lora_rank is None:
        q = times(hidden, "q_proj")
    else:
        q = times(normed(times(hidden, "q_a_proj"), "q_a_layernorm"), "q_b_proj")
    q = q.reshape(-1, dims.N, dims.qk_head_dim)
    latent = times(hidden, "kv_a_proj_with_mqa")
    rows = xp.concatenate(
        [normed(latent[:, : dims.L], "kv_a_layernorm"), _rotated(inputs, latent[:, dims.L :])], -1
    )
    q = xp.concatenate([q[..., : dims.P], _rotated(inputs, q[..., dims.P :])], -1)
    kv_b = inputs.weights["kv_b_proj.weight"].astype(numbers)
    kv_b = kv_b.reshape(dims.N, dims.P + dims.V, dims.L)
    restored = shape.phase == "decode" and problem.format.packed
    own = [_restored(inputs, rows), rows] if restored else [rows]
    attended = [xp.empty((shape.new_tokens, dims.N, dims.V), numbers) for _ in own]
    for request in range(shape.requests):
        part = slice(request * shape.tokens, (request + 1) * shape.tokens)
        context = inputs.context(request).astype(numbers)
        for new, out in zip(own, attended):
            keys = xp.concatenate([context, new[part]])
            out[part] = _attention(xp, q[part], keys, kv_b, dims.P, inputs.softmax_scale)
    gate = 1 / (1 + xp.exp(-times(hidden, "g_proj"))) if problem.gate else 1
    outs = [times(each.reshape(-1, dims.N * dims.V) * gate, "o_proj") for each in attended]
    return Expected(outs[0], rows, outs[1] - outs[0] if restored else None)


def _restored(inputs: Inputs, rows: Any) -> Any:
    """Rows as a decode finds its own in a packed cache; a prefill has its own as they are."""
    fmt, dims = inputs.problem.format, inputs.problem.dims
    stored = fmt.encode(rows.astype(np.float32), dims, k_scale=inputs.k_scale)
    return fmt.decode(stored, dims, k_scale=inputs.k_scale).astype(rows.dtype)


def _rotated(inputs: Inputs, x: Any) -> Any:
    """Pairs (2i, 2i + 1) of x `[T, ..., R]` turned by the angle of pair i at the token's position.

    The angle is that of the table, which is what a model has."""
    if inputs.rope is None:
        return x
    xp, half = inputs.xp, x.shape[-1] // 2
    angles = xp.asarray(inputs.rope.cos_sin[inputs.positions]).astype(x.dtype)
    angles = angles.reshape(len(x), *[1] * (x.ndim - 2), 2 * half)
    cosine, sine = angles[..., :half], angles[..., half:]
    first, second = x[..., 0::2], x[..., 1::2]
    turned = xp.empty_like(x)
    turned[..., 0::2] = first * cosine - second * sine
    turned[..., 1::2] = first * sine + second * cosine
    return turned


def _attention(xp: Any, q: Any, rows: Any, kv_b: Any, P: int, scale: float) -> Any:
    """Queries `[S, N, P + R]` at the last positions of latent rows `[K, L + R]`: `[S, N, V]`.

    Keys and values are projected up, `k = [W_UK c | k_pe]` and `v = W_UV c`, unless the queries are
    so few that it takes less to absorb the projections, `(W_UK^T q) . c` and `W_UV (sum p c)`.
    """
    (queries, heads, width), (keys, row) = q.shape, rows.shape
    V, L = kv_b.shape[1] - P, kv_b.shape[2]
    absorbed = queries * (row + L) < queries * (width + V) + (P + V) * L
    kv_c, k_pe = rows[:, :L], rows[:, L:]
    later = xp.arange(keys) > keys - queries + xp.arange(queries)[:, None]
    out = xp.empty((queries, heads, V), q.dtype)
    at_once = max(1, SCORES_AT_ONCE // (queries * keys))
    for first in range(0, heads, at_once):
        some = slice(first, first + at_once)
        w_uk, w_uv = kv_b[some, :P], kv_b[some, P:]
        q_nope, q_pe = q[:, some, :P].swapaxes(0, 1), q[:, some, P:].swapaxes(0, 1)
        if absorbed:
            scores = _shared(q_nope @ w_uk, kv_c.T)
        else:
            scores = q_nope @ (kv_c @ w_uk.swapaxes(1, 2)).swapaxes(1, 2)
        scores += _shared(q_pe, k_pe.T)
        scores *= scale
        if queries > 1:
            xp.copyto(scores, -np.inf, where=later)
        scores -= scores.max(axis=-1, keepdims=True)
        xp.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        if absorbed:
            found = _shared(scores, kv_c) @ w_uv.swapaxes(1, 2)
        else:
            found = scores @ (kv_c @ w_uv.swapaxes(1, 2))
        out[:, some] = found.swapaxes(0, 1)
    return out


def _shared(x: Any, matrix: Any) -> Any:
    """`x @ matrix` of x `[N, S, A]` and a matrix that all heads share, in one product."""
    return (x.reshape(-1, x.shape[-1]) @ matrix).reshape(*x.shape[:-1], matrix.shape[-1])
