from typing import Any

from sandbox.kernels.concat_insert import concat_insert_decode
from sandbox.kernels.concat_insert.unfused import (
    apart_refuses,
    copy_columns,
    insert_rotated,
    rope_columns,
)
from sandbox.kernels.concat_insert.unfused_quantize import quantize_heads


@concat_insert_decode.variant("raw_unfused", kind="cuda", preference=20, supports=apart_refuses)
def raw_unfused(**arguments: Any) -> None:
    """A launch each: copy or quantize ql_nope, rotate q_pe, insert, rotate the cached keys."""
    tokens, latent = arguments["slot_mapping"].shape[0], arguments["kv_c"].shape[1]
    ql_nope, q_pe = arguments["ql_nope"][:tokens], arguments["q_pe"][:tokens]
    q_out, descale = arguments["q_out"][:tokens], arguments["q_descale"]
    if descale is None:
        copy_columns(ql_nope, q_out[..., :latent])
    else:
        quantize_heads(ql_nope, q_out[..., :latent], descale)
    rotation = arguments["positions"], arguments["cos_sin"]
    rope_columns(q_pe, q_out[..., latent:], *rotation, descale)
    insert_rotated(arguments)
