"""Prefill attention by torch's flash attention of ragged batches."""

from __future__ import annotations

import math
from typing import Any

from sandbox import arrays
from sandbox.kernels.attention import prefill_attention
from sandbox.kernels.attention.checks import CODES
from sandbox.kernels.attention.torch_prefill_requests import by_products, each_request, store_lse
from sandbox.kernels.cuda.device import device_info

PIECE = 512
"""Most queries that the flash kernel gets as one request: a few of its tiles."""
WIDEST, OLDEST = 256, (8, 0)
ALIGNED = 8


def _refuses(q: Any, v: Any, out_dtype: Any, **_: Any) -> str | None:
    if not arrays.is_gpu(q):
        return None
    if q.dtype.name not in ("float16", "bfloat16"):
        kind = "E4M3 codes, whose descales are on the GPU" if q.dtype == CODES else q.dtype
        return f"torch's flash attention takes float16 and bfloat16, not {kind}"
    if out_dtype != q.dtype:
        return f"torch's flash attention gives {q.dtype} as q, not {out_dtype}"
    if max(q.shape[2], v.shape[2]) > WIDEST:
        return f"torch's flash attention takes heads of at most {WIDEST} elements"
    if device_info().cc < OLDEST:
        return f"torch's flash attention needs compute capability {OLDEST}"
    return None


@prefill_attention.variant(
    "torch_varlen", kind="torch", baseline=True, preference=2, supports=_refuses
)
def torch_varlen(**arguments: Any) -> None:
    """FlashAttention-2 as torch has it, values padded to the keys' width; on a CPU plain products.

    The grid of torch's kernel has the tiles of the longest request for every request, and the host
    does not know that length: so several requests are cut into pieces of at most `PIECE` queries,
    which see what they would have seen. Nothing waits for the GPU.
    """
    if not arrays.is_gpu(arguments["q"]):
        each_request(by_products, arguments)
        return
    import torch

    q, k, v, bounds_q, bounds_k, target = (
        arrays.to_torch(arguments[name])
        for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "out")
    )
    owned = torch.arange(len(q), device=q.device) < bounds_q[-1]
    if not len(q) or not len(k) or len(bounds_q) == 1:
        out, lse = target, torch.full(q.shape[1::-1], -math.inf, device=q.device)
    else:
        causal, scale = arguments["causal"], arguments["softmax_scale"]
        out, lse = flash(q, k, v, bounds_q, bounds_k, scale, causal)
    hidden = lse.isinf() | ~owned  # an LSE without keys is +inf
    torch.where(hidden.T[..., None], out.new_zeros(()), out[..., : target.shape[2]], out=target)
    store_lse(arguments, lse.masked_fill(hidden, -math.inf).T)


def flash(
    q: Any, k: Any, v: Any, bounds_q: Any, bounds_k: Any, scale: float, causal: bool
) -> tuple[Any, Any]:
    """Results `[Tq, N, V or more]` and natural LSEs `[N, Tq]`, anything where no request is."""
    import torch

    width = -(-max(q.shape[2], v.shape[2]) // ALIGNED) * ALIGNED
    longest, used = len(q), None
    if len(bounds_q) > 2:
        bounds_q, bounds_k, used = pieces(bounds_q, bounds_k, len(q), causal)
        longest = min(longest, PIECE)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *(_aligned(part, width) for part in (q, k, v)),
        bounds_q.contiguous(),
        bounds_k.contiguous(),
        longest,
        len(k),
        0.0,
        causal,
        False,
        scale=scale,
        seqused_k=used,
    )
    return out, lse


def pieces(bounds_q: Any, bounds_k: Any, tokens: int, causal: bool) -> tuple[Any, Any, Any]:
    """Requests in pieces of at most `PIECE` queries: bounds of their queries, first keys, numbers
    of keys. There are as many as there could be, so some are empty."""
    import torch

    queries, keys = bounds_q.diff(), bounds_k.diff()
    counts = (queries + PIECE - 1) // PIECE
    ends = counts.cumsum(0)
    places = torch.arange(tokens // PIECE + len(queries), device=bounds_q.device)
    owner = torch.searchsorted(ends, places, right=True).clamp(max=len(queries) - 1)
    starts = bounds_q[owner] + (places - (ends - counts)[owner]) * PIECE
    pieces_q = torch.cat([starts.clamp(max=bounds_q[-1]), bounds_q[-1:]]).int()
    used = keys[owner]
    if causal:
        used = used - queries[owner] + pieces_q[1:] - bounds_q[owner]
    return pieces_q, torch.cat([bounds_k[owner], bounds_k[-1:]]), used.clamp(min=0).int()


def _aligned(heads: Any, width: int) -> Any:
    """Heads of `width` elements, all of them at multiples of 16 bytes."""
    import torch

    if short := width - heads.shape[2]:
        return torch.nn.functional.pad(heads, (0, short))
    if heads.data_ptr() % 16 or any(stride % ALIGNED for stride in heads.stride()[:2]):
        return heads.clone(memory_format=torch.contiguous_format)
    return heads
