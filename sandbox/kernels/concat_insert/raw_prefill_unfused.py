from typing import Any

from sandbox.kernels.concat_insert import concat_insert_prefill
from sandbox.kernels.concat_insert.launch import in_place
from sandbox.kernels.concat_insert.raw_insert_vector import raw_vector
from sandbox.kernels.concat_insert.unfused import copy_columns, rope_cached, rope_columns


@concat_insert_prefill.variant("raw_unfused", kind="cuda", preference=20)
def raw_unfused(
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
) -> None:
    """A launch each: rotate q, concatenate k, rotate k for all heads, insert, rotate the rows."""
    tokens, nope = slot_mapping.shape[0], k_nope.shape[2]
    query, query_out, key_out = q[:tokens], q_out[:tokens], k_out[:tokens]
    aside = not in_place(q, q_out)
    if aside:
        copy_columns(query[..., :nope], query_out[..., :nope])
    if aside or positions is not None:
        rope_columns(query[..., nope:], query_out[..., nope:], positions, cos_sin)
    copy_columns(k_nope[:tokens], key_out[..., :nope])
    rope_columns(k_pe[:tokens, None], key_out[..., nope:], positions, cos_sin)
    raw_vector(kv_c=kv_c, k_pe=k_pe, cache=cache, slot_mapping=slot_mapping)
    rope_cached(k_pe, cache, slot_mapping, positions, cos_sin)
