"""The three ops as a torch user would write them."""

from __future__ import annotations

from typing import Any

from sandbox import arrays
from sandbox.kernels.concat_insert import (
    concat_insert,
    concat_insert_decode,
    concat_insert_prefill,
)


def _insert(kv_c: Any, k_pe: Any, cache: Any, slot_mapping: Any) -> None:
    """Index the cache with the slots; torch tensors, k_pe already rotated.

    A token without a row of its own repeats the write of one that has it, or, where none has, what
    the row holds already: dropping such tokens would wait for the GPU to count them.
    """
    import torch

    num_blocks, block_size, _ = cache.shape
    if not len(slot_mapping) or not num_blocks:
        return
    rows = torch.cat([kv_c, k_pe], dim=-1)
    kept = (slot_mapping >= 0) & (slot_mapping < num_blocks * block_size)
    tokens = torch.arange(len(slot_mapping), device=rows.device)
    tokens = torch.where(kept, tokens, kept.int().argmax())
    slots = torch.where(kept.any(), slot_mapping[tokens], 0)
    place = slots // block_size, slots % block_size
    cache[place] = torch.where(kept.any(), rows[tokens], cache[place])


def _rope(x: Any, positions: Any, cos_sin: Any) -> Any:
    """Pairs (2i, 2i + 1) of `[T, ..., R]` as complex numbers, turned in float32."""
    import torch

    if positions is None:
        return x
    known = (positions >= 0) & (positions < len(cos_sin))
    angles = torch.where(known[:, None], cos_sin[positions.clamp(0, len(cos_sin) - 1)], torch.nan)
    angles = angles.view(len(x), *[1] * (x.dim() - 2), x.shape[-1])
    cosine, sine = angles.chunk(2, dim=-1)
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    turned = torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], dim=-1)
    return turned.flatten(-2).to(x.dtype)


def _tensors(tokens: int, *rows: Any) -> list[Any]:
    """The first `tokens` rows of each array as tensors; None stays None."""
    return [None if array is None else arrays.to_torch(array)[:tokens] for array in rows]


@concat_insert.variant("torch", kind="torch", baseline=True, preference=1)
def torch_insert(kv_c: Any, k_pe: Any, cache: Any, slot_mapping: Any) -> None:
    """Concatenate, then index the cache with blocks and offsets."""
    kv_c, k_pe, slots = _tensors(slot_mapping.shape[0], kv_c, k_pe, slot_mapping)
    _insert(kv_c, k_pe, arrays.to_torch(cache), slots)


@concat_insert_prefill.variant("torch", kind="torch", baseline=True, preference=1)
def torch_prefill(
    q: Any,
    k_nope: Any,
    k_pe: Any,
    kv_c: Any,
    cache: Any,
    slot_mapping: Any,
    positions: Any,
    cos_sin: Any,
    q_out: Any,
    k_out: Any,
) -> None:
    """Rotate, slice assignments into q and k, then index the cache."""
    rows = (q, k_nope, k_pe, kv_c, slot_mapping, positions, q_out, k_out)
    q, k_nope, k_pe, kv_c, slots, positions, q_out, k_out = _tensors(slot_mapping.shape[0], *rows)
    table = None if positions is None else arrays.to_torch(cos_sin)
    nope = k_nope.shape[2]
    if q_out.data_ptr() != q.data_ptr():
        q_out[..., :nope] = q[..., :nope]
    if q_out.data_ptr() != q.data_ptr() or positions is not None:
        q_out[..., nope:] = _rope(q[..., nope:], positions, table)
    key = _rope(k_pe, positions, table)
    k_out[..., :nope] = k_nope
    k_out[..., nope:] = key[:, None]
    _insert(kv_c, key, arrays.to_torch(cache), slots)


@concat_insert_decode.variant("torch", kind="torch", baseline=True, preference=1)
def torch_decode(
    ql_nope: Any,
    q_pe: Any,
    kv_c: Any,
    k_pe: Any,
    cache: Any,
    slot_mapping: Any,
    positions: Any,
    cos_sin: Any,
    q_out: Any,
) -> None:
    """Rotate, slice assignments into q, then index the cache."""
    rows = (ql_nope, q_pe, kv_c, k_pe, slot_mapping, positions, q_out)
    ql_nope, q_pe, kv_c, k_pe, slots, positions, q_out = _tensors(slot_mapping.shape[0], *rows)
    table = None if positions is None else arrays.to_torch(cos_sin)
    q_out[..., : kv_c.shape[1]] = ql_nope
    q_out[..., kv_c.shape[1] :] = _rope(q_pe, positions, table)
    _insert(kv_c, _rope(k_pe, positions, table), arrays.to_torch(cache), slots)
