from typing import Any

from sandbox import arrays
from sandbox.kernels.concat_context import concat_context_fp8
from sandbox.kernels.concat_context.raw_vector import raw_vector
from sandbox.kernels.concat_insert.unfused_quantize import quantize_heads


@concat_context_fp8.variant("raw_unfused", kind="cuda", preference=20)
def raw_unfused(
    k_nope: Any,
    k_pe: Any,
    v: Any,
    k_descale: Any,
    v_descale: Any,
    k_out: Any,
    v_out: Any,
) -> None:
    """A launch each: concatenate the keys as they are, then quantize keys, quantize values."""
    tokens, count, nope = k_nope.shape
    xp = arrays.namespace(k_nope)
    keys = xp.empty((tokens, count, nope + k_pe.shape[1]), k_nope.dtype)
    raw_vector(k_nope=k_nope, k_pe=k_pe, k_out=keys)
    quantize_heads(keys, k_out[:tokens], k_descale)
    quantize_heads(v, v_out[:tokens], v_descale)
