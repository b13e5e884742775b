from typing import Any

from sandbox.kernels.concat_insert import concat_insert_decode
from sandbox.kernels.concat_insert.raw_insert_vector import raw_vector
from sandbox.kernels.concat_insert.unfused import copy_columns, rope_cached, rope_columns


@concat_insert_decode.variant("raw_unfused", kind="cuda", preference=20)
def raw_unfused(
    ql_nope: Any,
    q_pe: Any,
    kv_c: Any,
    k_pe: Any,
    cache: Any,
    slot_mapping: Any,
    positions: Any,
    cos_sin: Any,
    q_out: Any,
) -> None:
    """A launch each: copy the latent queries, rotate q_pe, insert, rotate the cached keys."""
    tokens, latent = slot_mapping.shape[0], kv_c.shape[1]
    copy_columns(ql_nope[:tokens], q_out[:tokens, :, :latent])
    rope_columns(q_pe[:tokens], q_out[:tokens, :, latent:], positions, cos_sin)
    raw_vector(kv_c=kv_c, k_pe=k_pe, cache=cache, slot_mapping=slot_mapping)
    rope_cached(k_pe, cache, slot_mapping, positions, cos_sin)
