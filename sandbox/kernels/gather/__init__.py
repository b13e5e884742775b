"""Paged latent rows to a contiguous workspace, as they are or restored to numbers."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from sandbox import arrays
from sandbox.cache_formats import FORMATS, CacheFormat, format_by_name, format_named
from sandbox.kernels import cache_arguments, require
from sandbox.kernels.gather import cases, reference
from sandbox.kernels.op import Output, operation

CODES = np.dtype(np.uint8)


def _check_values(
    cache: Any,
    block_table: Any,
    cu_seq_lens: Any,
    seq_starts: Any,
    num_tokens: int,
    k_scale: Any,
    **_: Any,
) -> None:
    cache_arguments.positive_scales(k_scale=k_scale)
    cu = cu_seq_lens.tolist()
    starts = seq_starts.tolist() if seq_starts is not None else [0] * (len(cu) - 1)
    if cu[0] < 0 or any(a > b for a, b in itertools.pairwise(cu)):
        raise ValueError("cu_seq_lens must not decrease and must not start below 0")
    if cu[-1] > num_tokens:
        raise ValueError(f"num_tokens is {num_tokens}, but cu_seq_lens ends at {cu[-1]}")
    num_blocks, block_size, _ = cache.shape
    for request, (start, begin, end) in enumerate(zip(starts, cu, cu[1:])):
        if begin == end:
            continue
        if start < 0:
            raise ValueError(f"seq_starts[{request}] is {start}, expected at least 0")
        columns = -(-(start + end - begin) // block_size)
        if columns > block_table.shape[1]:
            raise ValueError(
                f"block_table has {block_table.shape[1]} columns, too narrow for request "
                f"{request}, which needs {columns}"
            )
        used = block_table[request, start // block_size : columns]
        if int(used.min()) < 0 or int(used.max()) >= num_blocks:
            raise ValueError(
                f"block_table row {request} has an id outside 0..{num_blocks - 1}; "
                "it holds block ids, not slots"
            )


def _wanted_dtype(out_dtype: Any, out: Any, default: np.dtype) -> np.dtype:
    """The element type that the caller asks for, by name, by dtype, or by an array given."""
    if out_dtype is not None:
        return require.named_dtype(out_dtype, "out_dtype", (*require.FLOATS, CODES))
    return default if out is None else out.dtype


def _restored(
    rows: Any, name: str, fmt: CacheFormat, k_scale: Any, kv_lora_rank: Any, dtype: np.dtype
) -> tuple[int, dict[str, Any]]:
    """Columns of restored rows, and the arguments that say how to restore them."""
    if dtype not in require.FLOATS:
        names = ", ".join(each.name for each in require.FLOATS)
        raise TypeError(f"out is {dtype}, expected one of {names} for restored {fmt.name} rows")
    cache_arguments.aligned(rows, name, fmt)
    scale = cache_arguments.cache_scale(fmt, k_scale, rows)
    widths = cache_arguments.widths(rows, name, fmt, kv_lora_rank)
    return widths.L + widths.R, {"k_scale": scale, "kv_lora_rank": widths.L}


@operation(
    reference=reference.gather,
    make_inputs=cases.make_inputs,
    cases=cases.cases,
    workload_case=cases.workload_case,
    cost=cases.cost,
    tolerance=cases.tolerance,
    check_values=_check_values,
    returns=("out",),
    main_argument="cache",
)
def gather(
    cache: Any,
    block_table: Any,
    cu_seq_lens: Any,
    *,
    seq_starts: Any = None,
    num_tokens: int | None = None,
    out: Any = None,
    cache_format: str | None = None,
    k_scale: Any = None,
    kv_lora_rank: int | None = None,
    out_dtype: Any = None,
) -> dict[str, Any]:
    """Copy paged latent rows into a contiguous workspace, bit for bit or restored to numbers.

    Row `cu_seq_lens[b] + j` of `out` becomes the cache row at position `seq_starts[b] + j` of
    request `b`. Rows before `cu_seq_lens[0]` and from `cu_seq_lens[B]` on are left as they are.
    A position whose block-table column or block id is out of range gives a row of zeros.

    Rows of 16- and 32-bit caches are copied. Rows of packed caches (`uint8`) are restored: `out`
    gets the values of `CacheFormat.decode`, rounded once to its dtype. Or, with `out` or
    `out_dtype` uint8, their codes are copied, to be restored by `dequantize_context`.

    Args:
        cache: `[num_blocks, block_size, E]` float32, float16 or bfloat16, or
            `[num_blocks, block_size, row bytes]` uint8 codes; pages and rows may be strided, the
            last axis is contiguous.
        block_table: int32 `[B, columns]`, block ids (not slots); columns past a request's length
            are never read.
        cu_seq_lens: int32 `[B + 1]`, non-decreasing row bounds of the requests in `out`.
        seq_starts: int32 `[B]`, first position of each request, any alignment; None is 0.
        num_tokens: rows that `out` must hold, a host integer at least `cu_seq_lens[B]`. None
            reads `cu_seq_lens[B]`, which waits for the GPU and cannot be captured in a graph.
        out: `[>= num_tokens, columns]`, rows may be strided; columns are those of the cache for a
            copy and `E` for restored rows. None allocates `[num_tokens, columns]`. It shares no
            memory with the cache.
        cache_format: name of the cache's format; None is the plain format of its dtype. A uint8
            cache needs it, unless its codes are copied.
        k_scale: descale of `fp8_e4m3` and `fp8_e5m2` (value = code * k_scale), a number or a
            float32 array of one element, which may change between replays of a graph. An error
            where it is not applied.
        kv_lora_rank: `L`, needed to restore formats that keep latent and key apart.
        out_dtype: float32, float16, bfloat16 or uint8; None is that of `out`, or the cache's, or
            bfloat16 for a packed cache.

    Returns:
        `out`.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, dtype, rank or size, or a scale
            is missing or not wanted; nothing has been launched.
    """
    require.array(cache, "cache", "num_blocks", "block_size", "row")
    require.dtype(cache, "cache", *dict.fromkeys(fmt.storage for fmt in FORMATS.values()))
    require.strided_rows(cache, "cache")
    if cache.shape[1] == 0 or cache.shape[2] == 0:
        raise ValueError(f"cache has shape {cache.shape}: block_size and rows must not be empty")
    require.array(block_table, "block_table", "requests", "columns")
    require.dtype(block_table, "block_table", "int32")
    require.strided_rows(block_table, "block_table")
    require.array(cu_seq_lens, "cu_seq_lens", "requests + 1")
    require.dtype(cu_seq_lens, "cu_seq_lens", "int32")
    require.strided_rows(cu_seq_lens, "cu_seq_lens")
    requests = block_table.shape[0]
    require.size(cu_seq_lens, "cu_seq_lens", 0, requests + 1, "one more than block_table's rows")
    if seq_starts is not None:
        require.array(seq_starts, "seq_starts", "requests")
        require.dtype(seq_starts, "seq_starts", "int32")
        require.strided_rows(seq_starts, "seq_starts")
        require.size(seq_starts, "seq_starts", 0, requests, "one for each row of block_table")
    if num_tokens is None:
        num_tokens = int(cu_seq_lens[-1])
    num_tokens = require.integer(num_tokens, "num_tokens")
    rows = num_tokens
    if out is not None:
        require.array(out, "out", "tokens", "columns")
        require.at_least(out, "out", 0, num_tokens, "the workspace must hold num_tokens rows")
        require.Memory(out, "out").apart(require.Memory(cache, "cache"))
        rows = out.shape[0]
    copied = cache.dtype != CODES
    dtype = _wanted_dtype(out_dtype, out, cache.dtype if copied else arrays.bfloat16)
    if cache_format is not None or not (cache.dtype == CODES and dtype == CODES):
        cache_format = format_named(cache_format, cache.dtype).name
    if copied or dtype == CODES:
        if dtype != cache.dtype:
            raise TypeError(
                f"out is {dtype}, expected {cache.dtype}: rows of this cache are copied"
            )
        if k_scale is not None:
            raise ValueError("k_scale is given, but rows are copied as they are")
        columns, how = cache.shape[2], {"k_scale": None, "kv_lora_rank": None}
    else:
        fmt = FORMATS[cache_format]
        columns, how = _restored(cache, "cache", fmt, k_scale, kv_lora_rank, dtype)
    return {
        "num_tokens": num_tokens,
        "cache_format": cache_format,
        "out_dtype": dtype,
        "out": Output((rows, columns), dtype),
        **how,
    }


@operation(
    reference=reference.dequantize_context,
    make_inputs=cases.dequantize_inputs,
    cases=cases.dequantize_cases,
    workload_case=cases.dequantize_workload,
    cost=cases.dequantize_cost,
    tolerance=cases.tolerance,
    check_values=lambda *, k_scale, **_: cache_arguments.positive_scales(k_scale=k_scale),
    returns=("out",),
    main_argument="codes",
)
def dequantize_context(
    codes: Any,
    *,
    cache_format: str,
    k_scale: Any = None,
    kv_lora_rank: int | None = None,
    out_dtype: Any = None,
    out: Any = None,
) -> dict[str, Any]:
    """Restore rows that were gathered as codes: latent and key, each code times its scale.

    Takes codes alone, so that no row can be restored twice, and no format without its scale.
    `gather` with a dtype of numbers does both in one pass over memory.

    Args:
        codes: uint8 `[T, row bytes]`, rows may be strided.
        cache_format: name of a packed format.
        k_scale, kv_lora_rank: as for `gather`.
        out_dtype: float32, float16 or bfloat16; None is that of `out`, or bfloat16.
        out: `[>= T, E]`, rows may be strided; None allocates `[T, E]`. Shares no memory with codes.

    Returns:
        `out`: the values of `CacheFormat.decode`, rounded once. Rows from T on, of an array that
        the caller gave, are left as they are.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, dtype, rank or size, or a scale
            is missing or not wanted; nothing has been launched.
    """
    require.array(codes, "codes", "tokens", "row bytes")
    if codes.dtype != CODES:
        raise TypeError(f"codes is {codes.dtype}, expected uint8: these rows are numbers already")
    require.strided_rows(codes, "codes")
    if codes.shape[1] == 0:
        raise ValueError(f"codes has shape {tuple(codes.shape)}: rows must not be empty")
    rows = codes.shape[0]
    if out is not None:
        require.array(out, "out", "tokens", "E")
        require.at_least(out, "out", 0, rows, "one row for each of codes")
        require.Memory(out, "out").apart(require.Memory(codes, "codes"))
        rows = out.shape[0]
    dtype = _wanted_dtype(out_dtype, out, arrays.bfloat16)
    fmt = format_by_name(cache_format)
    if not fmt.packed:
        raise ValueError(f"cache_format is {fmt.name!r}, whose rows are numbers already")
    columns, how = _restored(codes, "codes", fmt, k_scale, kv_lora_rank, dtype)
    return {"out_dtype": dtype, "out": Output((rows, columns), dtype), **how}
