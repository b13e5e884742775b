"""Attention with an LSE: of ragged prompts over heads, and of few tokens over a paged latent."""

from __future__ import annotations

from typing import Any

import numpy as np

from sandbox.kernels import cache_arguments, require
from sandbox.kernels.attention import checks, decode_cases, prefill_cases, reference
from sandbox.kernels.lse import REQUEST_LAYOUTS, check_conventions, lse_shape, request_lse_shape
from sandbox.kernels.op import Output, operation

FLOAT32 = np.dtype(np.float32)
FAR = 2**31 - 1
"""A window that reaches as far as any position."""


def _check_prefill_values(
    q: Any,
    k: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    q_descale: Any,
    k_descale: Any,
    v_descale: Any,
    **_: Any,
) -> None:
    cache_arguments.positive_scales(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    checks.non_decreasing(cu_seqlens_q, "cu_seqlens_q", q.shape[0], from_zero=True)
    checks.non_decreasing(cu_seqlens_k, "cu_seqlens_k", k.shape[0])


@operation(
    reference=reference.prefill_attention,
    make_inputs=prefill_cases.make_inputs,
    cases=prefill_cases.cases,
    workload_case=prefill_cases.workload_case,
    cost=prefill_cases.cost,
    tolerance=prefill_cases.tolerance,
    check_values=_check_prefill_values,
    returns=("out", "out_lse"),
    main_argument="q",
)
def prefill_attention(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    softmax_scale: float,
    causal: bool = True,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    out: Any = None,
    out_lse: Any = None,
    out_dtype: Any = None,
    return_lse: bool = True,
    lse_base: str = "e",
    lse_layout: str = "NT",
) -> dict[str, Any]:
    """Softmax attention of each request's queries over its own keys, one key head a query head.

    Request `b` has queries `cu_seqlens_q[b]` to `cu_seqlens_q[b + 1]` and keys `cu_seqlens_k[b]`
    to `cu_seqlens_k[b + 1]`. With `causal` its last query sees all its keys, the one before all but
    the last, and so on: query `i` of `n` sees key `j` of `m` if `j <= m - n + i`. Scores, softmax
    and sums are float32, for scores up to 2^29; `lse = log(sum(exp(softmax_scale * q.k)))`.

    A query that sees no key, and a row of `q` that no request owns, gets exactly 0 and an LSE of
    -inf. Rows that no request owns never matter, whatever they hold; a NaN in a key or value that
    one query of a request sees may reach all its queries.

    Args:
        q: `[Tq, N, D]`, float32, float16 or bfloat16, or uint8 E4M3 codes with `q_descale`; tokens
            and heads may be strided, each array its own way, the last axis is contiguous.
        k: `[Tk, N, D]`, of q's dtype.
        v: `[Tk, N, V]`, of q's dtype; V need not be D, and a narrowed view of padded values is as
            good as any.
        cu_seqlens_q: int32 `[B + 1]`, non-decreasing, from 0 to at most Tq.
        cu_seqlens_k: int32 `[B + 1]`, non-decreasing, at most Tk.
        softmax_scale: what scores are multiplied by: `(P + R) ** -0.5`, times `mscale ** 2` of a
            YaRN model.
        causal: whether queries see later keys.
        q_descale, k_descale, v_descale: of codes (value = code * descale), numbers or float32
            arrays of one element, which may change between replays of a graph.
        out: `[Tq, N, V]`, strides of its own; shares no memory with an input. None allocates.
        out_lse: float32, `[N, Tq]` or `[Tq, N]` by `lse_layout`, any strides but negative ones.
        out_dtype: float32, float16 or bfloat16; None is that of `out`, or q's, bfloat16 for codes.
        return_lse: False neither computes nor returns `out_lse`.
        lse_base: `"e"` or `"2"`.
        lse_layout: `"NT"` or `"TN"`.

    Returns:
        `(out, out_lse)`, or `out` alone with `return_lse=False`.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, dtype, rank or shape, an output
            shares memory with another array, or (where values are checked) bounds decrease or
            reach beyond their rows; nothing has been launched.
    """
    check_conventions(return_lse, out_lse, lse_base, lse_layout)
    require.flag(causal, "causal")
    for name, value, width in (("q", q, "D"), ("k", k, "D"), ("v", v, "V")):
        checks.heads(value, name, "tokens", "heads", width)
        require.same_dtype(value, name, q, "q")
        require.size(value, name, 1, q.shape[1], "q's heads")
    require.size(k, "k", 2, q.shape[2], "q's D")
    require.size(v, "v", 0, k.shape[0], "k's tokens")
    requests = checks.bounds(cu_seqlens_q, "cu_seqlens_q", None)
    checks.bounds(cu_seqlens_k, "cu_seqlens_k", requests)
    dtype = checks.output_dtype(out_dtype, out, q)
    shape = (*q.shape[:2], v.shape[2])
    specs = {"out": Output(shape, dtype)}
    if return_lse:
        specs["out_lse"] = Output(lse_shape(shape, lse_layout), FLOAT32, any_strides=True)
    descales = {
        "q_descale": checks.descale(q_descale, "q_descale", q, "q"),
        "k_descale": checks.descale(k_descale, "k_descale", k, "k"),
        "v_descale": checks.descale(v_descale, "v_descale", v, "v"),
    }
    inputs = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    inputs |= descales
    return {
        **descales,
        **checks.outputs(specs, {"out": out, "out_lse": out_lse}, inputs),
        "softmax_scale": checks.softmax_scale(softmax_scale),
        "out_dtype": dtype,
    }


def _check_decode_values(
    q: Any,
    cache: Any,
    block_table: Any,
    seq_lens: Any,
    k_scale: Any,
    q_descale: Any,
    max_seq_len: int | None,
    key_mass: Any,
    indices: Any,
    **_: Any,
) -> None:
    cache_arguments.positive_scales(k_scale=k_scale, q_descale=q_descale)
    if indices is not None:
        slots = cache.shape[0] * cache.shape[1]
        if indices.size and int(indices.max()) >= slots:
            raise ValueError(f"indices has slot {int(indices.max())}, but the cache has {slots}")
        return
    for request, length in enumerate(seq_lens.tolist()):
        if length < 0:
            raise ValueError(f"seq_lens[{request}] is {length}, expected at least 0")
        if max_seq_len is not None and length > max_seq_len:
            raise ValueError(f"seq_lens[{request}] is {length}, more than max_seq_len")
        if key_mass is not None and length > key_mass.shape[2]:
            raise ValueError(
                f"key_mass has {key_mass.shape[2]} keys, but seq_lens[{request}] is {length}"
            )
        columns = -(-length // cache.shape[1])
        if columns > block_table.shape[1]:
            raise ValueError(
                f"block_table has {block_table.shape[1]} columns, too narrow for request "
                f"{request}, which needs {columns}"
            )
        if columns and int(block_table[request, :columns].max()) >= cache.shape[0]:
            raise ValueError(
                f"block_table row {request} has an id beyond {cache.shape[0] - 1}; "
                "it holds block ids, not slots"
            )


@operation(
    reference=reference.decode_attention,
    make_inputs=decode_cases.make_inputs,
    cases=decode_cases.cases,
    workload_case=decode_cases.workload_case,
    cost=decode_cases.cost,
    tolerance=decode_cases.tolerance,
    check_values=_check_decode_values,
    returns=("out", "out_lse", "key_mass"),
    main_argument="q",
)
def decode_attention(
    q: Any,
    cache: Any,
    block_table: Any,
    seq_lens: Any,
    *,
    softmax_scale: float,
    kv_lora_rank: int,
    cache_format: str | None = None,
    k_scale: Any = None,
    q_descale: Any = None,
    causal: bool = True,
    tree_mask: Any = None,
    window: int | None = None,
    indices: Any = None,
    sink: Any = None,
    num_splits: int | None = None,
    deterministic: bool = False,
    max_seq_len: int | None = None,
    out: Any = None,
    out_lse: Any = None,
    out_dtype: Any = None,
    return_lse: bool = True,
    lse_base: str = "e",
    lse_layout: str = "NT",
    key_mass: Any = None,
    return_key_mass: bool = False,
) -> dict[str, Any]:
    """Softmax attention of a few new tokens a request over its rows of a paged latent cache.

    All heads share the keys: the key at a position is the whole cache row, `E = L + R` values, and
    its value the first `L` of them. Rows of packed formats are restored as `CacheFormat.decode` has
    it, `k_scale` times code for scores and values alike; a variant may round restored rows of the
    formats with scales in the row to 16 bits. Scores, softmax and sums are float32, for scores up
    to 2^29; `lse` is `log(sum(exp(softmax_scale * q.k)))`.

    The `S` queries of a request stand at its last positions, `seq_len - S` on, whose rows are in
    the cache already. Which keys query `i` sees:

    - `causal`: those up to its own position, `j <= seq_len - S + i`; else all `seq_len` of them;
    - `tree_mask`: all before position `seq_len - S`, and new token `j` where bit `j % 32` of word
      `j // 32` is set, whatever its order;
    - `window`: of these, those at more than its own position less `window`;
    - `indices`: these slots and no others.

    A position whose block-table entry is not the id of a block, or that the table is too narrow
    for, holds no key. A query that sees no key gets exactly 0 and an LSE of -inf. Rows that no
    query of a request sees, and columns of the table past its length, never matter, whatever they
    hold; a NaN in a row that one query of a request sees may reach all its queries.

    Args:
        q: `[B, S, N, E]`, float32, float16 or bfloat16, or uint8 E4M3 codes with `q_descale`;
            all axes but the last may be strided.
        cache: `[num_blocks, block_size, E]` of q's dtype (any of the three beside codes), or
            `[num_blocks, block_size, row bytes]` uint8 codes; pages and rows may be strided.
        block_table: int32 `[B, columns]`, block ids (not slots). None with `indices`.
        seq_lens: int32 `[B]`, keys of each request, new tokens included. None with `indices`.
        softmax_scale: of the scores: `(P + R) ** -0.5` times `mscale ** 2`, never `E ** -0.5`.
        kv_lora_rank: `L`.
        cache_format: name of the cache's format; None is the plain format of its dtype.
        k_scale: descale of `fp8_e4m3` and `fp8_e5m2`, a number or a float32 array of one element,
            which may change between replays of a graph.
        q_descale: descale of the queries' codes, likewise.
        causal: whether a query sees later tokens of its request.
        tree_mask: int32 `[B, S, ceil(S / 32)]`, instead of `causal`.
        window: keys that a query sees at most, its own position included.
        indices: int32 `[B, S, K]`, slots (`block * block_size + row`) of each query's keys in any
            order; negative ones are holes, and a slot that is named twice counts twice. In the
            place of block table, lengths and masks.
        sink: float32 `[N]`, a logit for each head that takes part in the softmax and has no value:
            `out` shrinks by `exp(lse) / (exp(lse) + exp(sink))`, `lse` is without it.
        num_splits: into how many parts each request's keys are cut to be computed side by side;
            None chooses. A variant that does not split ignores it.
        deterministic: bits of a request's results depend on its own arguments alone, not on
            `num_splits` nor on the other requests of the batch.
        max_seq_len: no `seq_len` is larger; a host integer that spares workspace where the table
            is wide. None is all that the table has room for.
        out: `[B, S, N, L]`, strides of its own; shares no memory with an input. None allocates.
        out_lse: float32, `[N, B * S]`, `[B * S, N]` or `[B, N, S]` by `lse_layout`, any strides but
            negative ones.
        out_dtype: float32, float16 or bfloat16; None is that of `out`, or q's, bfloat16 for codes.
        return_lse: False does not return `out_lse`.
        lse_base: `"e"` or `"2"`.
        lse_layout: `"NT"`, `"TN"` or `"BNS"`.
        key_mass: float32 `[B, S, M]`, gets the probability that each key has of each query, summed
            over heads, by position (`M >= max(seq_lens)`; 0 beyond) or by entry of `indices`
            (`M = K`; 0 in holes). A query's masses sum to N, less what its sinks take.
        return_key_mass: allocates and returns `key_mass`, for all positions of the table.

    Returns:
        `(out, out_lse, key_mass)`, without those not asked for.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, dtype, rank or shape, arguments
            contradict each other, an output shares memory with another array, or (where values
            are checked) a length, block or slot is out of range; nothing has been launched.
    """
    check_conventions(return_lse, out_lse, lse_base, lse_layout, REQUEST_LAYOUTS)
    for name, flag in (
        ("causal", causal),
        ("deterministic", deterministic),
        ("return_key_mass", return_key_mass),
    ):
        require.flag(flag, name)
    checks.heads(q, "q", "requests", "tokens", "heads", "E")
    requests, tokens, num_heads, width = q.shape
    rows = checks.cache(cache, cache_format, k_scale, kv_lora_rank, width)
    if q.dtype != checks.CODES and cache.dtype not in (q.dtype, checks.CODES):
        raise TypeError(f"cache is {cache.dtype}, expected {q.dtype} as q, or uint8")
    if indices is None:
        checks.paged(block_table, seq_lens, requests)
        keys = block_table.shape[1] * cache.shape[1]
    else:
        checks.sparse(
            indices, requests, tokens,
            block_table=block_table, seq_lens=seq_lens, tree_mask=tree_mask, window=window,
            max_seq_len=max_seq_len,
        )  # fmt: skip
        keys = indices.shape[2]
    if tree_mask is not None:
        checks.tree(tree_mask, requests, tokens)
        if not causal:
            raise ValueError("tree_mask is given, but causal is False: one or the other")
    if sink is not None:
        require.array(sink, "sink", "heads")
        require.dtype(sink, "sink", FLOAT32)
        require.strided_rows(sink, "sink")
        require.size(sink, "sink", 0, num_heads, "q's heads")
    if max_seq_len is not None:
        max_seq_len = require.integer(max_seq_len, "max_seq_len")
    dtype = checks.output_dtype(out_dtype, out, q)
    shape = (requests, tokens, num_heads, rows["kv_lora_rank"])
    specs = {"out": Output(shape, dtype)}
    if return_lse:
        specs["out_lse"] = Output(request_lse_shape(shape, lse_layout), FLOAT32, any_strides=True)
    if return_key_mass or key_mass is not None:
        if key_mass is not None and indices is None:
            require.array(key_mass, "key_mass", "requests", "tokens", "keys")
            keys = key_mass.shape[2]
        specs["key_mass"] = Output((requests, tokens, keys), FLOAT32)
    given = {"out": out, "out_lse": out_lse, "key_mass": key_mass}
    inputs = {"q": q, "cache": cache, "block_table": block_table, "seq_lens": seq_lens}
    inputs |= {"tree_mask": tree_mask, "indices": indices, "sink": sink}
    q_descale = checks.descale(q_descale, "q_descale", q, "q")
    inputs |= {"q_descale": q_descale, "k_scale": rows["k_scale"]}
    return {
        **rows,
        **checks.outputs(specs, given, inputs),
        "softmax_scale": checks.softmax_scale(softmax_scale),
        "out_dtype": dtype,
        "q_descale": q_descale,
        "window": None if window is None else min(require.integer(window, "window", least=1), FAR),
        "num_splits": (
            None if num_splits is None else require.integer(num_splits, "num_splits", least=1)
        ),
        "max_seq_len": max_seq_len,
    }
