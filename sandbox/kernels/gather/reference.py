"""The oracles of gather and dequantize_context."""

from __future__ import annotations

from typing import Any

import numpy as np

from sandbox import arrays
from sandbox.cache_formats import FORMATS
from sandbox.kernels import cache_arguments


def gather(
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
) -> dict[str, Any]:
    """Every row looked up by itself: owner, position, block, row."""
    xp = arrays.namespace(cache)
    num_blocks, block_size, _ = cache.shape
    final = out.copy()
    rows = xp.arange(num_tokens)
    owner = xp.searchsorted(cu_seq_lens, rows, side="right") - 1
    owned = (owner >= 0) & (owner < block_table.shape[0])
    rows, owner = rows[owned], owner[owned]
    position = rows - cu_seq_lens[owner]
    if seq_starts is not None:
        position = position + seq_starts[owner]
    column = position // block_size
    in_table = (position >= 0) & (column < block_table.shape[1])
    block = xp.full(rows.shape, -1, dtype=xp.int64)
    block[in_table] = block_table[owner[in_table], column[in_table]]
    exists = (block >= 0) & (block < num_blocks)
    found = cache[block[exists], position[exists] % block_size]
    if out_dtype != cache.dtype:
        found = restored(found, cache_format, k_scale, kv_lora_rank, out_dtype)
    final[rows[exists]] = found
    final[rows[~exists]] = 0
    return {"out": final}


def dequantize_context(
    codes: Any,
    cache_format: str,
    k_scale: Any,
    kv_lora_rank: int | None,
    out_dtype: Any,
    out: Any,
) -> dict[str, Any]:
    final = out.copy()
    final[: codes.shape[0]] = restored(codes, cache_format, k_scale, kv_lora_rank, out_dtype)
    return {"out": final}


def restored(codes: Any, cache_format: str, k_scale: Any, L: int, dtype: Any) -> Any:
    """Packed rows as numbers of `dtype`, rounded once; what is too large becomes an infinity."""
    fmt = FORMATS[cache_format]
    scale = None if k_scale is None else float(k_scale[0])
    widths = cache_arguments.widths(codes, "codes", fmt, L)
    with np.errstate(over="ignore"):
        return fmt.decode(codes, widths, k_scale=scale).astype(dtype)
