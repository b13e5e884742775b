from typing import Any

from sandbox import arrays
from sandbox.kernels.gather import gather
from sandbox.kernels.gather.raw_dequantize_vector import restore_rows
from sandbox.kernels.gather.raw_tile import unsupported
from sandbox.kernels.gather.raw_warp import raw_warp
from sandbox.kernels.gather.restore import restores_only


def _unsupported(**arguments: Any) -> str | None:
    return restores_only(**arguments) or unsupported(**arguments)


@gather.variant("raw_unfused", kind="cuda", supports=_unsupported, preference=20)
def raw_unfused(
    cache: Any, cu_seq_lens: Any, num_tokens: int, out: Any, k_scale: Any, **others: Any
) -> None:
    """Copy the codes to a workspace of their own, restore them in a second launch."""
    codes = arrays.namespace(cache).empty((num_tokens, cache.shape[2]), cache.dtype)
    rows = {"cu_seq_lens": cu_seq_lens, "num_tokens": num_tokens, "k_scale": k_scale, **others}
    raw_warp(cache=cache, out=codes, **rows)
    restore_rows(codes, out, k_scale, cu_seq_lens, **others)
