"""Both ops as a torch user would write them."""

from __future__ import annotations

from typing import Any

from sandbox import arrays
from sandbox.kernels.concat_context import concat_context, concat_context_fp8


def _codes(x: Any, descale: Any) -> Any:
    """E4M3 codes of a tensor times `1 / descale`; torch's own conversion does not saturate."""
    import torch

    x = x.float() * (1.0 / descale)
    codes = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(x.isnan(), 0x7F, codes)


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
