"""The oracles: slice assignments, and codes by the exact encoder."""

from __future__ import annotations

from typing import Any

from sandbox.cache_formats import E4M3


def concat_context(k_nope: Any, k_pe: Any, k_out: Any) -> dict[str, Any]:
    tokens, _, nope = k_nope.shape
    final = k_out.copy()
    final[:tokens, :, :nope] = k_nope
    final[:tokens, :, nope:] = k_pe[:, None]
    return {"k_out": final}


def concat_context_fp8(
    k_nope: Any, k_pe: Any, v: Any, k_descale: Any, v_descale: Any, k_out: Any, v_out: Any
) -> dict[str, Any]:
    keys = concat_context(E4M3.quantize(k_nope, k_descale), E4M3.quantize(k_pe, k_descale), k_out)
    final = v_out.copy()
    final[: len(v)] = E4M3.quantize(v, v_descale)
    return {**keys, "v_out": final}
