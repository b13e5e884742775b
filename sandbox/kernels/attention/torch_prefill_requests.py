"""Prefill attention by torch, one request after another."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from sandbox import arrays
from sandbox.kernels.attention import prefill_attention
from sandbox.kernels.attention.checks import CODES
from sandbox.kernels.lse import NATURAL, by_token

SCORES_AT_ONCE = 1 << 28
MOST_STRIDE = 2**31 - 1

Attend = Callable[[Any, Any, Any, float, bool], tuple[Any, Any]]
"""Queries `[N, n, D]`, keys `[N, m, D]` and values of one request, scale, whether causal (then
`n <= m`), to results `[N, n, V]` and natural LSEs `[N, n]`."""


def store_lse(arguments: dict[str, Any], lse: Any) -> None:
    """Natural LSEs `[Tq, N]` to where they belong, if anywhere."""
    if (target := arguments["out_lse"]) is not None:
        lse = lse / NATURAL[arguments["lse_base"]]
        arrays.to_torch(by_token(target, arguments["lse_layout"])).copy_(lse)


def each_request(attend: Attend, arguments: dict[str, Any]) -> None:
    """Attention of one request at a time, by bounds and descales that the host reads."""
    import torch

    q, k, v = (numbers(arguments[name]) for name in "qkv")
    scale, value_scale, causal = arguments["softmax_scale"], 1.0, arguments["causal"]
    if arguments["q"].dtype == CODES:
        q_scale, k_scale, value_scale = (float(arguments[f"{name}_descale"][0]) for name in "qkv")
        scale *= q_scale * k_scale
    out = torch.zeros((*q.shape[:2], v.shape[2]), device=q.device)
    lse = torch.full(q.shape[:2], -math.inf, device=q.device)
    bounds_q, bounds_k = (arguments[f"cu_seqlens_{name}"].tolist() for name in "qk")
    for first, end, first_key, end_key in zip(bounds_q, bounds_q[1:], bounds_k, bounds_k[1:]):
        if causal:  # of more queries than keys the first see none
            first = max(first, end - (end_key - first_key))
        if first < end and first_key < end_key:
            parts = q[first:end], k[first_key:end_key], v[first_key:end_key]
            heads = (part.transpose(0, 1) for part in parts)
            found = attend(*heads, scale, causal and end - first > 1)
            out[first:end], lse[first:end] = (part.transpose(0, 1) for part in found)
    arrays.to_torch(arguments["out"]).copy_(out.mul_(value_scale))
    store_lse(arguments, lse)


def numbers(values: Any) -> Any:
    """Numbers as they are, copied where cuBLAS cannot take their strides; E4M3 codes as bfloat16,
    which holds each of them."""
    import torch

    tensor = arrays.to_torch(values)
    if values.dtype != CODES:
        return tensor if max(tensor.stride()) <= MOST_STRIDE else tensor.contiguous()
    return tensor.view(torch.float8_e4m3fn).to(torch.bfloat16)


def product(left: Any, right: Any) -> Any:
    """Batched product in float32; if `right` has 16 bits, a GPU rounds `left` to them too, for its
    tensor cores."""
    import torch

    if right.is_cuda and right.dtype != torch.float32:
        return torch.bmm(left.to(right.dtype), right, out_dtype=torch.float32)
    return torch.bmm(left.float(), right.float())


def by_products(q: Any, k: Any, v: Any, scale: float, causal: bool) -> tuple[Any, Any]:
    """Some heads at once: scores, a softmax in float32, weights times values."""
    import torch

    n, m = q.shape[1], k.shape[1]
    at_once = max(1, SCORES_AT_ONCE // (n * m))
    hidden = torch.ones(n, m, dtype=torch.bool, device=q.device).triu(m - n + 1) if causal else None
    results = []
    for queries, keys, values in zip(*(part.split(at_once) for part in (q, k, v))):
        scores = product(queries, keys.transpose(1, 2)).mul_(scale)
        if causal:
            scores.masked_fill_(hidden, -math.inf)
        top = scores.amax(dim=-1, keepdim=True)
        weights = scores.sub_(top).exp_()
        total = weights.sum(dim=-1, keepdim=True)
        results.append((product(weights, values) / total, (top + total.log())[..., 0]))
    out, lse = zip(*results)
    return torch.cat(out), torch.cat(lse)


def by_sdpa(q: Any, k: Any, v: Any, scale: float, causal: bool) -> tuple[Any, Any]:
    """The device's fused operator, where there is one that gives an LSE; else products."""
    fused = _cudnn if q.is_cuda else _flash_for_cpu
    found = fused(q[None], k[None], v[None], scale, causal)
    if found is None:
        return by_products(q, k, v, scale, causal)
    out, lse = found
    return out[0, ..., : v.shape[2]], lse.reshape(q.shape[:2])


def _flash_for_cpu(q: Any, k: Any, v: Any, scale: float, causal: bool) -> tuple[Any, Any]:
    """Heads of one width; a mask, as its `is_causal` is meant for as many keys as queries; in
    float32, since its exponential of 16-bit inputs is a rough one."""
    import torch

    n, m, width = q.shape[2], k.shape[2], max(q.shape[3], v.shape[3])
    pad = torch.nn.functional.pad
    padded = (pad(part.float(), (0, width - part.shape[3])) for part in (q, k, v))
    mask = torch.full((n, m), -math.inf).triu(m - n + 1) if causal else None
    run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return run(*padded, attn_mask=mask, scale=scale)


def _cudnn(q: Any, k: Any, v: Any, scale: float, causal: bool) -> tuple[Any, Any] | None:
    """cuDNN takes values of another width than keys. None where it cannot run."""
    import torch

    if causal and q.shape[2] != k.shape[2]:
        return None
    problem = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, causal, False)
    if not torch.backends.cuda.can_use_cudnn_attention(problem):
        return None
    run = torch.ops.aten._scaled_dot_product_cudnn_attention
    return run(q, k, v, None, True, 0.0, causal, scale=scale)[:2]


def _refuses(q: Any, **_: Any) -> str | None:
    if arrays.capturing(arrays.exporter(q)):
        return "the host reads the bounds, which cannot be captured in a graph"
    return None


def _refuses_wider(q: Any, out_dtype: Any, **others: Any) -> str | None:
    if q.dtype != CODES and out_dtype.itemsize > q.dtype.itemsize:
        return f"torch's SDPA gives {q.dtype} as q, not {out_dtype}"
    return _refuses(q, **others)


@prefill_attention.variant("torch_sdpa", kind="torch", preference=1, supports=_refuses_wider)
def torch_sdpa(**arguments: Any) -> None:
    """A request at a time by torch's SDPA: cuDNN on a GPU where it can, flash in float32 on a CPU.

    The host waits for the bounds, so that no graph can hold it. Codes go in as bfloat16.
    """
    each_request(by_sdpa, arguments)


@prefill_attention.variant("torch_matmul", kind="torch", preference=0, supports=_refuses)
def torch_matmul(**arguments: Any) -> None:
    """A request at a time by two batched products and a softmax over all scores in float32.

    The host waits for the bounds, so that no graph can hold it.
    """
    each_request(by_products, arguments)
