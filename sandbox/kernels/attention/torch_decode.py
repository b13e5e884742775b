"""Decode attention as a torch user would write it: rows gathered, two batched products."""

from __future__ import annotations

import math
from typing import Any

from sandbox import arrays
from sandbox.cache_formats import FORMATS, CacheFormat, Widths
from sandbox.kernels.attention import decode_attention
from sandbox.kernels.attention.torch_decode_keys import Keys, chosen_keys, paged_keys
from sandbox.kernels.attention.torch_prefill_requests import numbers, product
from sandbox.kernels.gather.torch_baseline import restore_rows
from sandbox.kernels.lse import NATURAL, by_request

ELEMENTS_AT_ONCE = 1 << 28
"""Of scores, or of rows, that some requests may have at a time."""


def _refuses(deterministic: bool, **_: Any) -> str | None:
    if deterministic:
        return "torch's batched products may round differently in another batch"
    return None


@decode_attention.variant("torch", kind="torch", baseline=True, preference=1, supports=_refuses)
def torch_decode(**arguments: Any) -> None:
    """Rows gathered, padded to the table's width; a product, softmax in float32, another product.

    The host knows all shapes, so that nothing waits for the GPU.
    """
    requests, tokens, heads, width = arguments["q"].shape
    queries = numbers(arguments["q"])
    if arguments["indices"] is None:
        keys = paged_keys(arguments, tokens)
    else:
        keys = chosen_keys(arguments)
        queries = queries.flatten(0, 1)[:, None]
    if not queries.numel() or not keys.blocks.numel() or not len(arguments["cache"]):
        _store(arguments, 0.0, -math.inf, 0.0)
        return
    of_request = keys.blocks.shape[1] * max(queries.shape[1] * heads, width)
    at_once = max(1, ELEMENTS_AT_ONCE // of_request)
    found = [
        _attend(arguments, queries[first : first + at_once], keys.part(first, first + at_once))
        for first in range(0, len(queries), at_once)
    ]
    _store(arguments, *(_joined(parts, requests, tokens) for parts in zip(*found)))


def _joined(parts: Any, requests: int, tokens: int) -> Any:
    """Results of some requests each, or of some queries, as `[B, S, ...]`."""
    import torch

    if parts[0] is None:
        return None
    joined = torch.cat(parts)
    return joined.reshape(requests, tokens, *joined.shape[2:])


def _store(arguments: dict[str, Any], out: Any, lse: Any, mass: Any) -> None:
    """Results to where they belong, tensors or one number for all elements."""
    arrays.to_torch(arguments["out"])[...] = out
    if (target := arguments["out_lse"]) is not None:
        shaped = by_request(target, arguments["lse_layout"], *arguments["q"].shape[:2])
        arrays.to_torch(shaped)[...] = lse / NATURAL[arguments["lse_base"]]
    if (target := arguments["key_mass"]) is not None:
        masses = arrays.to_torch(target)
        masses.zero_()
        if not isinstance(mass, float):
            count = min(masses.shape[2], mass.shape[2])
            masses[..., :count] = mass[..., :count]


def _attend(arguments: dict[str, Any], queries: Any, keys: Keys) -> tuple[Any, Any, Any]:
    """Results `[R, S, N, L]`, natural LSEs `[R, S, N]` and, if wanted, masses `[R, S, M]`."""
    fmt = FORMATS[arguments["cache_format"]]
    rows = _restored(arguments, _rows(arguments, keys), fmt)
    k_scale = arrays.to_torch(arguments["k_scale"]) if fmt.needs_scale else 1.0
    scale = arguments["softmax_scale"] * k_scale
    if arguments["q_descale"] is not None:
        scale = scale * arrays.to_torch(arguments["q_descale"])
    scores = product(queries.flatten(1, 2).to(rows.dtype), rows.transpose(1, 2)).mul_(scale)
    scores = scores.unflatten(1, queries.shape[1:3])
    scores.masked_fill_(~keys.seen[:, :, None], -math.inf)
    top = scores.amax(dim=-1, keepdim=True)
    weights = scores.sub_(top.masked_fill(top == -math.inf, 0)).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    lse = (top + total.log())[..., 0]
    norm = total.reciprocal()
    if arguments["sink"] is not None:
        norm = norm * (lse - arrays.to_torch(arguments["sink"])).sigmoid()[..., None]
    norm = norm.masked_fill(total == 0, 0)
    latents = rows[..., : arguments["kv_lora_rank"]]
    sums = product(weights.flatten(1, 2), latents).unflatten(1, queries.shape[1:3])
    mass = None if arguments["key_mass"] is None else (weights * norm).sum(dim=2)
    return sums * norm * k_scale, lse, mass


def _rows(arguments: dict[str, Any], keys: Keys) -> Any:
    """Rows of the cache `[R, M, row]`, zeros where no query sees one."""
    wanted = keys.seen.any(dim=1)
    rows = arrays.to_torch(arguments["cache"])[keys.blocks.where(wanted, 0), keys.offsets]
    return rows.masked_fill_(~wanted[..., None], 0)


def _restored(arguments: dict[str, Any], rows: Any, fmt: CacheFormat) -> Any:
    """Rows as numbers that can be multiplied, less the `k_scale` that all have.

    Codes with one scale for all are exact in 16 bits; others are rounded to bfloat16 where queries
    have no more than that.
    """
    import torch

    if not fmt.packed:
        return rows
    name = arguments["q"].dtype.name
    if fmt.needs_scale:
        kind = torch.float8_e5m2 if fmt.name == "fp8_e5m2" else torch.float8_e4m3fn
        return rows.view(kind).to(torch.bfloat16 if name == "uint8" else getattr(torch, name))
    L = arguments["kv_lora_rank"]
    widths = Widths(L, arguments["q"].shape[3] - L)
    values = restore_rows(rows.flatten(0, 1), fmt, widths, None).unflatten(0, rows.shape[:2])
    return values if name in ("float32", "float16") else values.to(torch.bfloat16)
