"""The four ops as a torch user would write them."""

from __future__ import annotations

from typing import Any

from sandbox import arrays
from sandbox.kernels.concat_insert import (
    concat_insert,
    concat_insert_decode,
    concat_insert_prefill,
    concat_insert_prefill_fp8,
)
from sandbox.kernels.concat_insert.torch_codes import encode_rows, float8


def _insert(
    kv_c: Any,
    key: Any,
    slots: Any,
    cache: Any,
    cache_format: str,
    k_scale: Any,
    tile_scale: str | None,
) -> None:
    """Index the cache with the slots; tensors of T rows, the key already rotated.

    A token without a row of its own repeats the write of one that has it, or, where none has, what
    the row holds already: dropping such tokens would wait for the GPU to count them.
    """
    import torch

    cache = arrays.to_torch(cache)
    num_blocks, block_size, _ = cache.shape
    if not len(slots) or not num_blocks:
        return
    if cache.dtype == torch.uint8:
        k_scale = None if k_scale is None else arrays.to_torch(k_scale)
        rows = encode_rows(kv_c.float(), key.float(), cache_format, k_scale, tile_scale)
    else:
        rows = torch.cat([kv_c, key.to(kv_c.dtype)], dim=-1)
    kept = (slots >= 0) & (slots < num_blocks * block_size)
    tokens = torch.arange(len(slots), device=rows.device)
    tokens = torch.where(kept, tokens, kept.int().argmax())
    slots = torch.where(kept.any(), slots[tokens], 0)
    place = slots // block_size, slots % block_size
    cache[place] = torch.where(kept.any(), rows[tokens], cache[place])


def _rope(x: Any, positions: Any, cos_sin: Any) -> Any:
    """Pairs (2i, 2i + 1) of `[T, ..., R]` as complex numbers, turned in float32 and left so."""
    import torch

    if positions is None:
        return x
    known = (positions >= 0) & (positions < len(cos_sin))
    angles = torch.where(known[:, None], cos_sin[positions.clamp(0, len(cos_sin) - 1)], torch.nan)
    angles = angles.view(len(x), *[1] * (x.dim() - 2), x.shape[-1])
    cosine, sine = angles.chunk(2, dim=-1)
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    turned = torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], dim=-1)
    return turned.flatten(-2)


def _tensors(tokens: int, *rows: Any) -> list[Any]:
    """The first `tokens` rows of each array as tensors; None stays None."""
    return [None if array is None else arrays.to_torch(array)[:tokens] for array in rows]


def _codes(values: Any, descale: Any) -> Any:
    """E4M3 codes for a reader that multiplies by `descale`."""
    return float8(values.float() * arrays.to_torch(descale).reciprocal(), "float8_e4m3fn")


@concat_insert.variant("torch", kind="torch", baseline=True, preference=1)
def torch_insert(kv_c: Any, k_pe: Any, slot_mapping: Any, **row: Any) -> None:
    """Concatenate, encode, then index the cache with blocks and offsets."""
    _insert(*_tensors(slot_mapping.shape[0], kv_c, k_pe, slot_mapping), **row)


@concat_insert_prefill.variant("torch", kind="torch", baseline=True, preference=1)
def torch_prefill(
    q: Any,
    k_nope: Any,
    k_pe: Any,
    kv_c: Any,
    slot_mapping: Any,
    positions: Any,
    cos_sin: Any,
    q_out: Any,
    k_out: Any,
    **row: Any,
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
    _insert(kv_c, key, slots, **row)


@concat_insert_prefill_fp8.variant("torch", kind="torch", baseline=True, preference=1)
def torch_prefill_fp8(
    q: Any,
    k_nope: Any,
    v: Any,
    k_pe: Any,
    kv_c: Any,
    slot_mapping: Any,
    q_descale: Any,
    k_descale: Any,
    v_descale: Any,
    positions: Any,
    cos_sin: Any,
    q_out: Any,
    k_out: Any,
    v_out: Any,
    **row: Any,
) -> None:
    """Rotate, cast to float8, slice assignments into q, k and v, then index the cache."""
    rows = (q, k_nope, v, k_pe, kv_c, slot_mapping, positions, q_out, k_out, v_out)
    tensors = _tensors(slot_mapping.shape[0], *rows)
    q, k_nope, v, k_pe, kv_c, slots, positions, q_out, k_out, v_out = tensors
    table = None if positions is None else arrays.to_torch(cos_sin)
    nope = k_nope.shape[2]
    key = _rope(k_pe, positions, table)
    q_out[..., :nope] = _codes(q[..., :nope], q_descale)
    q_out[..., nope:] = _codes(_rope(q[..., nope:], positions, table), q_descale)
    k_out[..., :nope] = _codes(k_nope, k_descale)
    k_out[..., nope:] = _codes(key, k_descale)[:, None]
    v_out[...] = _codes(v, v_descale)
    _insert(kv_c, key, slots, **row)


@concat_insert_decode.variant("torch", kind="torch", baseline=True, preference=1)
def torch_decode(
    ql_nope: Any,
    q_pe: Any,
    kv_c: Any,
    k_pe: Any,
    slot_mapping: Any,
    positions: Any,
    cos_sin: Any,
    q_out: Any,
    q_descale: Any,
    **row: Any,
) -> None:
    """Rotate, slice assignments into q, cast if to float8, then index the cache."""
    rows = (ql_nope, q_pe, kv_c, k_pe, slot_mapping, positions, q_out)
    ql_nope, q_pe, kv_c, k_pe, slots, positions, q_out = _tensors(slot_mapping.shape[0], *rows)
    table = None if positions is None else arrays.to_torch(cos_sin)
    turned = _rope(q_pe, positions, table)
    if q_descale is not None:
        ql_nope, turned = (_codes(part, q_descale) for part in (ql_nope, turned))
    q_out[..., : kv_c.shape[1]] = ql_nope
    q_out[..., kv_c.shape[1] :] = turned
    _insert(kv_c, _rope(k_pe, positions, table), slots, **row)
