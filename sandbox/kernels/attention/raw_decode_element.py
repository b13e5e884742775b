from pathlib import Path
from typing import Any

from sandbox.kernels.attention import decode_attention
from sandbox.kernels.attention.key_mass import write_key_mass
from sandbox.kernels.attention.launch import (
    from_natural,
    key_arguments,
    latent_macros,
    request_lse,
    strides,
)
from sandbox.kernels.cuda import CudaKernel

KERNEL = CudaKernel(Path(__file__).with_suffix(".cu"), "decode_attention_element")
MOST_WARPS = 8
SHARED_SUMS = 8192


@decode_attention.variant("raw_element", kind="cuda", preference=10)
def raw_element(**arguments: Any) -> None:
    """A block a query and head, a warp a key at a time; nothing split, nothing shared by heads."""
    q, out, lse = arguments["q"], arguments["out"], request_lse(arguments)
    requests, tokens, heads, _ = q.shape
    warps = max(1, min(MOST_WARPS, SHARED_SUMS // arguments["kv_lora_rank"]))
    KERNEL(
        requests * tokens * heads,
        32 * warps,
        q,
        *key_arguments(arguments),
        strides(q, 3),
        arguments["softmax_scale"],
        arguments["q_descale"],
        arguments["k_scale"],
        out,
        strides(out, 3),
        lse,
        strides(lse, 3),
        from_natural(arguments["lse_base"]),
        arguments["sink"],
        heads,
        macros={**latent_macros(arguments), "OUT": out.dtype, "WARPS": warps},
    )
    if arguments["key_mass"] is not None:
        write_key_mass(arguments, lse)
