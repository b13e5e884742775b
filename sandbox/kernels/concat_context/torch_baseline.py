"""Both ops as a torch user would write them."""

from __future__ import annotations

from typing import Any

from sandbox import arrays
from sandbox.kernels.concat_context import concat_context, concat_context_fp8
from sandbox.kernels.concat_insert.torch_codes import float8


def _codes(values: Any, descale: Any) -> Any:
    """E4M3 codes for a reader that multiplies by `descale`."""
    return float8(values.float() * descale.reciprocal(), "float8_e4m3fn")


@concat_context.variant("torch", kind="torch", baseline=True, preference=1)
def torch_concat(k_nope: Any, k_pe: Any, k_out: Any) -> None:
    """Two slice assignments."""
    keys, nope = arrays.to_torch(k_out)[: k_nope.shape[0]], k_nope.shape[2]
    keys[..., :nope] = arrays.to_torch(k_nope)
    keys[..., nope:] = arrays.to_torch(k_pe)[:, None]


@concat_context_fp8.variant("torch", kind="torch", baseline=True, preference=1)
def torch_fp8(
    k_nope: Any, k_pe: Any, v: Any, k_descale: Any, v_descale: Any, k_out: Any, v_out: Any
) -> None:
    """Multiply in float32, clamp, convert, then slice assignments."""
    tokens, _, nope = k_nope.shape
    keys, values = (arrays.to_torch(array)[:tokens] for array in (k_out, v_out))
    k_descale, v_descale = arrays.to_torch(k_descale), arrays.to_torch(v_descale)
    keys[..., :nope] = _codes(arrays.to_torch(k_nope), k_descale)
    keys[..., nope:] = _codes(arrays.to_torch(k_pe), k_descale)[:, None]
    values[...] = _codes(arrays.to_torch(v), v_descale)
