from typing import Any

from sandbox.kernels.concat_insert import concat_insert_prefill
from sandbox.kernels.concat_insert.launch import in_place
from sandbox.kernels.concat_insert.unfused import (
    apart_refuses,
    copy_columns,
    insert_rotated,
    rope_columns,
)


@concat_insert_prefill.variant("raw_unfused", kind="cuda", preference=20, supports=apart_refuses)
def raw_unfused(**arguments: Any) -> None:
    """A launch each: rotate q, concatenate k, rotate k for all heads, insert, rotate the rows."""
    q, k_nope, q_out = arguments["q"], arguments["k_nope"], arguments["q_out"]
    tokens, nope = arguments["slot_mapping"].shape[0], k_nope.shape[2]
    rotation = arguments["positions"], arguments["cos_sin"]
    query, query_out, key_out = q[:tokens], q_out[:tokens], arguments["k_out"][:tokens]
    aside = not in_place(q, q_out)
    if aside:
        copy_columns(query[..., :nope], query_out[..., :nope])
    if aside or rotation[0] is not None:
        rope_columns(query[..., nope:], query_out[..., nope:], *rotation)
    copy_columns(k_nope[:tokens], key_out[..., :nope])
    rope_columns(arguments["k_pe"][:tokens, None], key_out[..., nope:], *rotation)
    insert_rotated(arguments)
