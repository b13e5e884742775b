"""Gather and dequantize_context as a torch user would write them."""

from __future__ import annotations

from typing import Any

from sandbox import arrays
from sandbox.cache_formats import FORMATS, CacheFormat, Widths
from sandbox.cache_formats.ds_mla import TILE
from sandbox.kernels.gather import dequantize_context, gather


def restore_rows(codes: Any, fmt: CacheFormat, widths: Widths, k_scale: Any) -> Any:
    """Rows of codes `[T, bytes]` as float32 `[T, L + R]`; torch tensors, T > 0."""
    import torch

    fields = {
        name: codes[:, field.offset : field.offset + field.nbytes].contiguous()
        for name, field in fmt.fields(widths).items()
    }
    if fmt.needs_scale:
        kind = torch.float8_e5m2 if fmt.name == "fp8_e5m2" else torch.float8_e4m3fn
        return codes.contiguous().view(kind).float() * k_scale
    if fmt.tile_scales:
        tiles = fields["kv_c"].view(torch.float8_e4m3fn).float().unflatten(1, (-1, TILE))
        latent = tiles * fields["kv_c_scales"].view(torch.float32)[..., None]
        return torch.cat([latent.flatten(1), fields["k_pe"].view(torch.bfloat16).float()], dim=1)
    parts = []
    for name in ("kv_c", "k_pe"):
        values = fields[name].view(torch.int8)
        if fmt.name == "int4_per_token":
            values = torch.stack([values << 4 >> 4, values >> 4], dim=-1).flatten(1)
        parts.append(values.float() * fields[f"{name}_scale"].view(torch.float32))
    return torch.cat(parts, dim=1)


def _restored(codes: Any, out: Any, cache_format: str, kv_lora_rank: int, k_scale: Any) -> Any:
    """The same in the element type of `out`."""
    widths = Widths(kv_lora_rank, out.shape[1] - kv_lora_rank)
    scale = None if k_scale is None else arrays.to_torch(k_scale)
    return restore_rows(codes, FORMATS[cache_format], widths, scale).to(out.dtype)


@gather.variant("torch", kind="torch", baseline=True, preference=1)
def torch_index(
    cache: Any,
    block_table: Any,
    cu_seq_lens: Any,
    seq_starts: Any,
    num_tokens: int,
    out: Any,
    cache_format: str | None,
    k_scale: Any,
    kv_lora_rank: int | None,
    out_dtype: Any,
) -> None:
    """Row ids by searchsorted and the block table, one index, then restored if need be."""
    import torch

    cache_t, table, bounds, out_t = map(
        arrays.to_torch, (cache, block_table, cu_seq_lens, out[:num_tokens])
    )
    requests, columns = table.shape
    num_blocks, block_size, _ = cache_t.shape
    if not requests or not num_tokens:
        return
    if not columns:
        table = torch.full((requests, 1), -1, dtype=table.dtype, device=table.device)
    if not num_blocks:
        cache_t = torch.zeros((1, *cache_t.shape[1:]), dtype=cache_t.dtype, device=table.device)
    rows = torch.arange(num_tokens, device=cache_t.device)
    owner = torch.searchsorted(bounds, rows.to(bounds.dtype), right=True) - 1
    owned = (owner >= 0) & (owner < requests)
    owner = owner.clamp(0, requests - 1)
    position = rows - bounds[owner]
    if seq_starts is not None:
        position = position + arrays.to_torch(seq_starts)[owner]
    column = position // block_size
    found = (position >= 0) & (column < columns)
    block = table[owner, column.clamp(0, table.shape[1] - 1)]
    found &= (block >= 0) & (block < num_blocks)
    values = cache_t[block.clamp(0, cache_t.shape[0] - 1), position.clamp(min=0) % block_size]
    if out_dtype != cache.dtype:
        values = _restored(values, out_t, cache_format, kv_lora_rank, k_scale)
    values = torch.where(found[:, None], values, 0)
    out_t.copy_(torch.where(owned[:, None], values, out_t))


@dequantize_context.variant("torch", kind="torch", baseline=True, preference=1)
def torch_restore(
    codes: Any, cache_format: str, k_scale: Any, kv_lora_rank: int, out_dtype: Any, out: Any
) -> None:
    """Views of the codes as torch's 8-bit types, times their scales."""
    out_t = arrays.to_torch(out[: codes.shape[0]])
    if len(codes):
        codes_t = arrays.to_torch(codes)
        out_t.copy_(_restored(codes_t, out_t, cache_format, kv_lora_rank, k_scale))
