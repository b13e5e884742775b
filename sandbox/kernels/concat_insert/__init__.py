"""Latent rows into the paged cache, alone or fused with RoPE and the concatenation of heads."""

from __future__ import annotations

from typing import Any

import numpy as np

from sandbox.kernels import cache_arguments, require
from sandbox.kernels.concat_insert import cases, checks, costs, reference
from sandbox.kernels.op import Output, operation


@operation(
    reference=reference.concat_insert,
    make_inputs=cases.insert_inputs,
    cases=cases.insert_cases,
    workload_case=cases.insert_workload,
    cost=costs.insert_cost,
    tolerance=costs.insert_tolerance,
    check_values=checks.values,
    mutates=("cache",),
    returns=(),
    main_argument="cache",
)
def concat_insert(
    kv_c: Any,
    k_pe: Any,
    cache: Any,
    slot_mapping: Any,
    *,
    cache_format: str | None = None,
    k_scale: Any = None,
    tile_scale: str | None = None,
) -> dict[str, Any]:
    """Write `[kv_c | k_pe]` of every token into its slot of the paged cache, in the cache's format.

    A 16- or 32-bit cache gets the bits; a packed one the bytes of `CacheFormat.encode`. Slot `s` is
    row `s % block_size` of block `s // block_size`. A token whose slot is negative, or beyond the
    cache, writes nothing; slot 0 and block 0 are ordinary. Of two tokens with the same slot, which
    one is kept is undefined, piece by piece.

    Args:
        kv_c: latent `[>= T, L]`, float32, float16 or bfloat16; rows may be strided.
        k_pe: shared key `[>= T, R]` or `[>= T, 1, R]` of kv_c's dtype, R even; rows may be
            strided. None is R = 0.
        cache: `[num_blocks, block_size, L + R]` of kv_c's dtype, or
            `[num_blocks, block_size, row bytes]` uint8 codes; written in place; pages and rows may
            be strided. It shares no memory with `kv_c` and `k_pe`.
        slot_mapping: int64 `[T]`. `kv_c` and `k_pe` may be longer; their other rows are not read.
        cache_format: name of the cache's format; None is the plain format of its dtype. A uint8
            cache needs it.
        k_scale: descale of `fp8_e4m3` and `fp8_e5m2` (stored = value / k_scale), a number or a
            float32 array of one element, which may change between replays of a graph. An error
            for other formats.
        tile_scale: how `fp8_ds_mla` chooses the scale of a tile: `"pow2"` (None) or `"raw"`.

    Returns:
        None.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, dtype, rank or size, or (where
            values are checked) a slot is beyond the cache; nothing has been written.
    """
    _, rows = checks.rows_to_insert(
        kv_c, k_pe, cache, slot_mapping, cache_format, k_scale, tile_scale
    )
    return rows


@operation(
    reference=reference.concat_insert_prefill,
    make_inputs=cases.prefill_inputs,
    cases=cases.prefill_cases,
    workload_case=cases.prefill_workload,
    cost=costs.prefill_cost,
    tolerance=costs.prefill_tolerance,
    check_values=checks.values,
    mutates=("cache",),
    returns=("q_out", "k_out"),
    main_argument="cache",
)
def concat_insert_prefill(
    q: Any,
    k_nope: Any,
    k_pe: Any,
    kv_c: Any,
    cache: Any,
    slot_mapping: Any,
    *,
    positions: Any = None,
    cos_sin: Any = None,
    q_out: Any = None,
    k_out: Any = None,
    cache_format: str | None = None,
    k_scale: Any = None,
    tile_scale: str | None = None,
) -> dict[str, Any]:
    """RoPE on q and k_pe, whole keys for every head, and the cache rows, for attention over heads.

    For every token: `q_out = [q_nope | rope(q_pe)]`, `k_out = [k_nope | rope(k_pe)]` with the same
    rotated key for each head, and, as `concat_insert` does it, the cache row
    `[kv_c | rope(k_pe)]`, in a plain format with the same bits again. Heads are written also for
    tokens whose slot is negative. RoPE turns pairs `(2i, 2i + 1)` in float32 and rounds once, to
    16 bits or to a packed format's code; without `positions` and `cos_sin` the columns are copied
    (NoPE). A position outside the table gives NaN in the token's
    rotated columns. No input changes, but q if it is also `q_out`.

    Args:
        q: `[>= T, N, P + R]`, strided in token and head.
        k_nope: `[>= T, N, P]`, strided in token and head (a half of kv_b_proj's output).
        k_pe, kv_c, cache, slot_mapping, cache_format, k_scale, tile_scale: as for `concat_insert`.
        positions: int64 `[>= T]`, rows of the table.
        cos_sin: float32 `[max_pos, R]`, each row `[cos(R / 2) | sin(R / 2)]`.
        q_out: `[>= T, N, P + R]`; q itself works in place, where only the R columns are rewritten;
            None allocates `[T, N, P + R]`.
        k_out: `[>= T, N, P + R]`; None allocates `[T, N, P + R]`.

    Returns:
        `(q_out, k_out)`. Rows from T on, of arrays that the caller gave, are left as they are.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, dtype, rank or size, an output
            shares memory with another argument, or (where values are checked) a slot or a
            position is out of range; nothing has been written.
    """
    tokens, rows = checks.rows_to_insert(
        kv_c, k_pe, cache, slot_mapping, cache_format, k_scale, tile_scale
    )
    rotation = checks.prefill_heads(q, k_nope, rows["k_pe"], kv_c, tokens, positions, cos_sin)
    outputs = {}
    for name, value in (("q_out", q_out), ("k_out", k_out)):
        shape = (checks.output_rows(value, name, tokens), *q.shape[1:])
        outputs[name] = Output(shape, q.dtype)
    inputs = {"q": q, "k_nope": k_nope, "k_pe": rows["k_pe"], "kv_c": kv_c}
    inputs |= {"slot_mapping": slot_mapping, **rotation, "cache": cache}
    checks.apart({"q_out": q_out, "k_out": k_out}, inputs)
    return {**rows, **rotation, **outputs}


@operation(
    reference=reference.concat_insert_prefill_fp8,
    make_inputs=cases.prefill_fp8_inputs,
    cases=cases.prefill_fp8_cases,
    workload_case=cases.prefill_fp8_workload,
    cost=costs.prefill_fp8_cost,
    tolerance=costs.prefill_fp8_tolerance,
    check_values=checks.values,
    mutates=("cache",),
    returns=("q_out", "k_out", "v_out"),
    main_argument="q",
)
def concat_insert_prefill_fp8(
    q: Any,
    k_nope: Any,
    v: Any,
    k_pe: Any,
    kv_c: Any,
    cache: Any,
    slot_mapping: Any,
    *,
    q_descale: Any,
    k_descale: Any,
    v_descale: Any,
    positions: Any = None,
    cos_sin: Any = None,
    q_out: Any = None,
    k_out: Any = None,
    v_out: Any = None,
    cache_format: str | None = None,
    k_scale: Any = None,
    tile_scale: str | None = None,
) -> dict[str, Any]:
    """RoPE on q and k_pe, whole keys, q, k and v as E4M3 codes, and the cache rows.

    As `concat_insert_prefill`, but `q_out`, `k_out` and `v_out` are codes of
    `[q_nope | rope(q_pe)]`, `[k_nope | rope(k_pe)]` and `v`, for an attention that reads
    `code * descale`. A code is that of `value * (1 / descale)`, a float32 reciprocal and a float32
    product, saturating; rotated values stay float32 until then. The cache has a format and a scale
    of its own.

    Args:
        q, k_nope, k_pe, kv_c, cache, slot_mapping, positions, cos_sin, cache_format, k_scale,
            tile_scale: as for `concat_insert_prefill`.
        v: `[>= T, N, V]` of q's dtype, strided in token and head (a half of kv_b_proj's output).
        q_descale, k_descale, v_descale: numbers, or float32 arrays of one element.
        q_out, k_out: uint8 `[>= T, N, P + R]`; None allocates `[T, N, P + R]`.
        v_out: uint8 `[>= T, N, V]`; None allocates `[T, N, V]`.

    Returns:
        `(q_out, k_out, v_out)`. Rows from T on, of arrays that the caller gave, are left as they
        are.

    Raises:
        TypeError, ValueError: as for `concat_insert_prefill`, or a descale is missing.
    """
    tokens, rows = checks.rows_to_insert(
        kv_c, k_pe, cache, slot_mapping, cache_format, k_scale, tile_scale
    )
    rotation = checks.prefill_heads(q, k_nope, rows["k_pe"], kv_c, tokens, positions, cos_sin)
    checks.heads(v, "v", "V", kv_c, tokens)
    require.size(v, "v", 1, q.shape[1], "q's heads")
    if v.shape[2] == 0:
        raise ValueError(f"v has shape {tuple(v.shape)}: V must be positive")
    descales = {
        name: cache_arguments.scale(value, name, cache)
        for name, value in (
            ("q_descale", q_descale),
            ("k_descale", k_descale),
            ("v_descale", v_descale),
        )
    }
    given = {"q_out": q_out, "k_out": k_out, "v_out": v_out}
    outputs = {}
    for name, value in given.items():
        width = v.shape[2] if name == "v_out" else q.shape[2]
        shape = (checks.output_rows(value, name, tokens), q.shape[1], width)
        outputs[name] = Output(shape, np.dtype(np.uint8))
    inputs = {"q": q, "k_nope": k_nope, "v": v, "k_pe": rows["k_pe"], "kv_c": kv_c}
    inputs |= {"slot_mapping": slot_mapping, **rotation, **descales, "cache": cache}
    checks.apart(given, inputs)
    return {**rows, **rotation, **descales, **outputs}


@operation(
    reference=reference.concat_insert_decode,
    make_inputs=cases.decode_inputs,
    cases=cases.decode_cases,
    workload_case=cases.decode_workload,
    cost=costs.decode_cost,
    tolerance=costs.decode_tolerance,
    check_values=checks.values,
    mutates=("cache",),
    returns=("q_out",),
    main_argument="cache",
)
def concat_insert_decode(
    ql_nope: Any,
    q_pe: Any,
    kv_c: Any,
    k_pe: Any,
    cache: Any,
    slot_mapping: Any,
    *,
    positions: Any = None,
    cos_sin: Any = None,
    q_out: Any = None,
    q_descale: Any = None,
    cache_format: str | None = None,
    k_scale: Any = None,
    tile_scale: str | None = None,
) -> dict[str, Any]:
    """RoPE, absorbed queries over the latent, and the cache rows, for attention over the cache.

    For every token: `q_out = [ql_nope | rope(q_pe)]` for each head and, as `concat_insert` does
    it, the cache row `[kv_c | rope(k_pe)]`. RoPE, NoPE, positions outside the table and tokens with
    a negative slot: as for `concat_insert_prefill`. No input changes.

    With `q_descale` the queries are E4M3 codes, as those of `concat_insert_prefill_fp8`. Queries
    and cache are chosen apart: 16-bit queries beside an fp8 cache are one launch too.

    Args:
        ql_nope: `[>= T, N, L]`, strided in token and head (a transposed `[N, T, L]` product).
        q_pe: `[>= T, N, R]`, strided in token and head (a slice of q). None is R = 0.
        kv_c, k_pe, cache, slot_mapping, cache_format, k_scale, tile_scale: as for `concat_insert`.
        positions, cos_sin: as for `concat_insert_prefill`.
        q_out: `[>= T, N, L + R]` of ql_nope's dtype, or uint8 with `q_descale`; None allocates
            `[T, N, L + R]`.
        q_descale: descale of the queries' codes, a number or a float32 array of one element.

    Returns:
        `q_out`. Rows from T on, of an array that the caller gave, are left as they are.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, dtype, rank or size, q_out
            shares memory with another argument, or (where values are checked) a slot or a
            position is out of range; nothing has been written.
    """
    tokens, rows = checks.rows_to_insert(
        kv_c, k_pe, cache, slot_mapping, cache_format, k_scale, tile_scale
    )
    checks.heads(ql_nope, "ql_nope", "L", kv_c, tokens)
    require.size(ql_nope, "ql_nope", 2, kv_c.shape[1], "kv_c's L")
    q_pe = ql_nope[..., :0] if q_pe is None else q_pe
    checks.heads(q_pe, "q_pe", "R", kv_c, tokens)
    require.size(q_pe, "q_pe", 1, ql_nope.shape[1], "ql_nope's heads")
    require.size(q_pe, "q_pe", 2, rows["k_pe"].shape[1], "k_pe's R")
    rotation = checks.rope(positions, cos_sin, q_pe.shape[2], tokens)
    if q_descale is not None:
        q_descale = cache_arguments.scale(q_descale, "q_descale", cache)
    dtype = ql_nope.dtype if q_descale is None else np.dtype(np.uint8)
    width = ql_nope.shape[2] + q_pe.shape[2]
    shape = (checks.output_rows(q_out, "q_out", tokens), ql_nope.shape[1], width)
    inputs = {"ql_nope": ql_nope, "q_pe": q_pe, "kv_c": kv_c, "k_pe": rows["k_pe"]}
    inputs |= {"slot_mapping": slot_mapping, "cache": cache, "q_descale": q_descale}
    checks.apart({"q_out": q_out}, {**inputs, **rotation})
    replaced = {"q_pe": q_pe, "q_descale": q_descale, "q_out": Output(shape, dtype)}
    return {**rows, **rotation, **replaced}
