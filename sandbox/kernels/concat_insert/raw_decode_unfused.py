from typing import Any

from sandbox.kernels.concat_insert import concat_insert_decode
from sandbox.kernels.concat_insert.unfused import (
    apart_refuses,
    copy_columns,
    insert_rotated,
    quantise_columns,
    rope_columns,
)


def _refuses(kv_c: Any, q_descale: Any, **arguments: Any) -> str | None:
    if q_descale is not None and kv_c.shape[1] % 2:
        return f"kv_c's L = {kv_c.shape[1]} is odd, codes are written by the pair"
    return apart_refuses(kv_c=kv_c, **arguments)


@concat_insert_decode.variant("raw_unfused", kind="cuda", preference=20, supports=_refuses)
def raw_unfused(**arguments: Any) -> None:
    """A launch each: copy or quantise ql_nope, rotate q_pe, insert, rotate the cached keys."""
    tokens, latent = arguments["slot_mapping"].shape[0], arguments["kv_c"].shape[1]
    ql_nope, q_pe = arguments["ql_nope"][:tokens], arguments["q_pe"][:tokens]
    q_out, descale = arguments["q_out"][:tokens], arguments["q_descale"]
    rotation = arguments["positions"], arguments["cos_sin"]
    if descale is None:
        copy_columns(ql_nope, q_out[..., :latent])
        rope_columns(q_pe, q_out[..., latent:], *rotation)
    else:
        quantise_columns(ql_nope, q_out[..., :latent], descale)
        quantise_columns(q_pe, q_out[..., latent:], descale, *rotation)
    insert_rotated(arguments)
