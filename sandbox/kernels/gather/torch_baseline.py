"""Gather as a torch user would write it."""

from __future__ import annotations

from typing import Any

from sandbox import arrays
from sandbox.kernels.gather import gather


@gather.variant("torch", kind="torch", baseline=True, preference=1)
def torch_index(
    cache: Any, block_table: Any, cu_seq_lens: Any, seq_starts: Any, num_tokens: int, out: Any
) -> None:
    """Row ids by searchsorted and the block table, then one index."""
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
    values = torch.where(found[:, None], values, 0)
    out_t.copy_(torch.where(owned[:, None], values, out_t))
