"""Latent rows into the paged cache, alone or fused with RoPE and the concatenation of heads."""

from __future__ import annotations

from typing import Any

from sandbox.kernels import require
from sandbox.kernels.concat_insert import cases, checks, reference
from sandbox.kernels.op import Output, operation


@operation(
    reference=reference.concat_insert,
    make_inputs=cases.insert_inputs,
    cases=cases.insert_cases,
    workload_case=cases.insert_workload,
    cost=cases.insert_cost,
    tolerance=cases.insert_tolerance,
    check_values=checks.values,
    mutates=("cache",),
    returns=(),
    main_argument="cache",
)
def concat_insert(kv_c: Any, k_pe: Any, cache: Any, slot_mapping: Any) -> dict[str, Any]:
    """Write `[kv_c | k_pe]` of every token into its slot of the paged cache, bit for bit.

    Slot `s` is row `s % block_size` of block `s // block_size`. A token whose slot is negative, or
    beyond the cache, writes nothing; slot 0 and block 0 are ordinary. Of two tokens with the same
    slot, which one is kept is undefined, column by column.

    Args:
        kv_c: latent `[>= T, L]`, float32, float16 or bfloat16; rows may be strided.
        k_pe: shared key `[>= T, R]` or `[>= T, 1, R]` of kv_c's dtype, R even; rows may be
            strided. None is R = 0.
        cache: `[num_blocks, block_size, L + R]` of kv_c's dtype, written in place; pages and rows
            may be strided.
        slot_mapping: int64 `[T]`. `kv_c` and `k_pe` may be longer; their other rows are not read.

    Returns:
        None.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, dtype, rank or size, or (where
            values are checked) a slot is beyond the cache; nothing has been written.
    """
    _, k_pe = checks.rows_to_insert(kv_c, k_pe, cache, slot_mapping)
    return {"k_pe": k_pe}


@operation(
    reference=reference.concat_insert_prefill,
    make_inputs=cases.prefill_inputs,
    cases=cases.prefill_cases,
    workload_case=cases.prefill_workload,
    cost=cases.prefill_cost,
    tolerance=cases.prefill_tolerance,
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
) -> dict[str, Any]:
    """RoPE on q and k_pe, whole keys for every head, and the cache rows, for attention over heads.

    For every token: `q_out = [q_nope | rope(q_pe)]`, `k_out = [k_nope | rope(k_pe)]` with the same
    rotated key for each head, and, as `concat_insert` does it, the cache row
    `[kv_c | rope(k_pe)]` with the same bits again. Heads are written also for tokens whose slot is
    negative. RoPE turns pairs `(2i, 2i + 1)` in float32 and rounds once; without `positions` and
    `cos_sin` the columns are copied (NoPE). A position outside the table gives NaN in the token's
    rotated columns. No input changes, but q if it is also `q_out`.

    Args:
        q: `[>= T, N, P + R]`, strided in token and head.
        k_nope: `[>= T, N, P]`, strided in token and head (a half of kv_b_proj's output).
        k_pe, kv_c, cache, slot_mapping: as for `concat_insert`.
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
    tokens, k_pe = checks.rows_to_insert(kv_c, k_pe, cache, slot_mapping)
    checks.heads(k_nope, "k_nope", "P", kv_c, tokens)
    checks.heads(q, "q", "P + R", kv_c, tokens)
    require.size(q, "q", 1, k_nope.shape[1], "k_nope's heads")
    width = k_nope.shape[2] + k_pe.shape[1]
    if k_nope.shape[2] == 0:
        raise ValueError(f"k_nope has shape {tuple(k_nope.shape)}: P must be positive")
    require.size(q, "q", 2, width, "k_nope's P + k_pe's R")
    rotation = checks.rope(positions, cos_sin, k_pe.shape[1], tokens)
    outputs = {}
    for name, value in (("q_out", q_out), ("k_out", k_out)):
        shape = (checks.output_rows(value, name, tokens), q.shape[1], width)
        outputs[name] = Output(shape, q.dtype)
    inputs = {"q": q, "k_nope": k_nope, "k_pe": k_pe, "kv_c": kv_c, "slot_mapping": slot_mapping}
    checks.apart({"q_out": q_out, "k_out": k_out}, {**inputs, **rotation, "cache": cache})
    return {"k_pe": k_pe, **rotation, **outputs}


@operation(
    reference=reference.concat_insert_decode,
    make_inputs=cases.decode_inputs,
    cases=cases.decode_cases,
    workload_case=cases.decode_workload,
    cost=cases.decode_cost,
    tolerance=cases.decode_tolerance,
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
) -> dict[str, Any]:
    """RoPE, absorbed queries over the latent, and the cache rows, for attention over the cache.

    For every token: `q_out = [ql_nope | rope(q_pe)]` for each head and, as `concat_insert` does
    it, the cache row `[kv_c | rope(k_pe)]`. RoPE, NoPE, positions outside the table and tokens with
    a negative slot: as for `concat_insert_prefill`. No input changes.

    Args:
        ql_nope: `[>= T, N, L]`, strided in token and head (a transposed `[N, T, L]` product).
        q_pe: `[>= T, N, R]`, strided in token and head (a slice of q). None is R = 0.
        kv_c, k_pe, cache, slot_mapping: as for `concat_insert`.
        positions, cos_sin: as for `concat_insert_prefill`.
        q_out: `[>= T, N, L + R]`; None allocates `[T, N, L + R]`.

    Returns:
        `q_out`. Rows from T on, of an array that the caller gave, are left as they are.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, dtype, rank or size, q_out
            shares memory with another argument, or (where values are checked) a slot or a
            position is out of range; nothing has been written.
    """
    tokens, k_pe = checks.rows_to_insert(kv_c, k_pe, cache, slot_mapping)
    checks.heads(ql_nope, "ql_nope", "L", kv_c, tokens)
    require.size(ql_nope, "ql_nope", 2, kv_c.shape[1], "kv_c's L")
    q_pe = ql_nope[..., :0] if q_pe is None else q_pe
    checks.heads(q_pe, "q_pe", "R", kv_c, tokens)
    require.size(q_pe, "q_pe", 1, ql_nope.shape[1], "ql_nope's heads")
    require.size(q_pe, "q_pe", 2, k_pe.shape[1], "k_pe's R")
    rotation = checks.rope(positions, cos_sin, k_pe.shape[1], tokens)
    shape = (checks.output_rows(q_out, "q_out", tokens), ql_nope.shape[1], cache.shape[2])
    inputs = {"ql_nope": ql_nope, "q_pe": q_pe, "kv_c": kv_c, "k_pe": k_pe}
    inputs |= {"slot_mapping": slot_mapping, "cache": cache}
    checks.apart({"q_out": q_out}, {**inputs, **rotation})
    return {"q_pe": q_pe, "k_pe": k_pe, **rotation, "q_out": Output(shape, cache.dtype)}
