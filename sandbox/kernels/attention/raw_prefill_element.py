from pathlib import Path
from typing import Any

from sandbox.kernels.attention import prefill_attention
from sandbox.kernels.attention.launch import from_natural, strides, token_lse
from sandbox.kernels.cuda import CudaKernel

KERNEL = CudaKernel(Path(__file__).with_suffix(".cu"), "prefill_attention_element")
THREADS = 128


@prefill_attention.variant("raw_element", kind="cuda", preference=10)
def raw_element(**arguments: Any) -> None:
    """A warp a query and head, a key at a time."""
    q, k, v, out = (arguments[name] for name in ("q", "k", "v", "out"))
    tokens, heads, width = q.shape
    lse = token_lse(arguments)
    bounds_q, bounds_k = arguments["cu_seqlens_q"], arguments["cu_seqlens_k"]
    KERNEL(
        -(-tokens * 32 // THREADS) * heads,
        THREADS,
        q,
        strides(q, 2),
        k,
        strides(k, 2),
        v,
        strides(v, 2),
        bounds_q,
        bounds_k,
        bounds_q.shape[0] - 1,
        out,
        strides(out, 2),
        lse,
        strides(lse, 2),
        from_natural(arguments["lse_base"]),
        arguments["softmax_scale"],
        arguments["q_descale"],
        arguments["k_descale"],
        arguments["v_descale"],
        tokens,
        k.shape[0],
        heads,
        macros={
            "ELEMENT": q.dtype,
            "OUT": out.dtype,
            "WIDTH": width,
            "VALUE_WIDTH": v.shape[2],
            "CAUSAL": bool(arguments["causal"]),
            "THREADS": THREADS,
        },
    )
