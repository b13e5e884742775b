from typing import Any

from sandbox import arrays
from sandbox.kernels.concat_insert import concat_insert_prefill_fp8
from sandbox.kernels.concat_insert.raw_prefill_unfused import raw_unfused as prefill_unfused
from sandbox.kernels.concat_insert.unfused import apart_refuses
from sandbox.kernels.concat_insert.unfused_quantize import quantize_heads


@concat_insert_prefill_fp8.variant(
    "raw_unfused", kind="cuda", preference=20, supports=apart_refuses
)
def raw_unfused(**arguments: Any) -> None:
    """The unfused prefill, then a launch each for the codes of queries, keys and values."""
    q, v, tokens = arguments["q"], arguments["v"], arguments["slot_mapping"].shape[0]
    xp = arrays.namespace(q)
    heads = {name: xp.empty((tokens, *q.shape[1:]), q.dtype) for name in ("q_out", "k_out")}
    prefill_unfused(**{**arguments, **heads})
    quantize_heads(heads["q_out"], arguments["q_out"][:tokens], arguments["q_descale"])
    quantize_heads(heads["k_out"], arguments["k_out"][:tokens], arguments["k_descale"])
    quantize_heads(v[:tokens], arguments["v_out"][:tokens], arguments["v_descale"])
