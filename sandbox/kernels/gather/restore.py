"""What the variants that restore packed rows share: whether, how many values at once, macros."""

from __future__ import annotations

from typing import Any

from sandbox import arrays
from sandbox.cache_formats import FORMATS, Widths


def restores(cache: Any, out: Any, **_: Any) -> bool:
    """Whether this call of gather restores rows; else it copies them."""
    return cache.dtype != out.dtype


def copies_only(**arguments: Any) -> str | None:
    """Why a variant of gather that cannot restore refuses a call, or None."""
    return "copies rows, cannot restore them" if restores(**arguments) else None


def restores_only(**arguments: Any) -> str | None:
    """Why a variant of gather that has nothing to say of copies refuses a call, or None."""
    return None if restores(**arguments) else "restores rows, does not copy them"


def codes_a_byte(cache_format: str) -> int:
    return 2 if cache_format == "int4_per_token" else 1


def values_at_once(
    rows: Any, out: Any, cache_format: str, kv_lora_rank: int, widest: int = 16
) -> int:
    """Values that make an access of `out`, of `widest` bytes at most: a power of two.

    They lie in one field, and all rows allow the accesses to their codes. 0 where that is not so
    even for the values of one byte of codes.
    """
    shared, item = codes_a_byte(cache_format), out.dtype.itemsize
    fmt, widths = FORMATS[cache_format], Widths(kv_lora_rank, out.shape[1] - kv_lora_rank)
    sources = [arrays.address(rows), *rows.strides[:-1]]
    if fmt.tile_scales:
        sources.append(fmt.fields(widths)["k_pe"].offset)
    targets = [arrays.address(out), out.strides[0]]
    count = widest // item
    while count >= shared:
        if (
            widths.L % count == widths.R % count == 0
            and not any(place % (count // shared) for place in sources)
            and not any(place % (count * item) for place in targets)
        ):
            return count
        count //= 2
    return 0


def no_vectors(rows: Any, out: Any, cache_format: str, kv_lora_rank: int, **_: Any) -> str | None:
    """Why no access of `out` takes all values of a byte of codes, or None."""
    if values_at_once(rows, out, cache_format, kv_lora_rank):
        return None
    return "rows of out must start at multiples of two elements, as two codes share a byte"


def element_macros(out: Any, cache_format: str, kv_lora_rank: int, **_: Any) -> dict[str, Any]:
    """Macros of `restore.cuh`: the values of a byte of codes at once."""
    return _macros(out, cache_format, kv_lora_rank, codes_a_byte(cache_format))


def vector_macros(
    rows: Any, out: Any, cache_format: str, kv_lora_rank: int, **_: Any
) -> dict[str, Any]:
    """Macros of `restore.cuh`: as many values at once as an access of `out` takes."""
    count = values_at_once(rows, out, cache_format, kv_lora_rank)
    return _macros(out, cache_format, kv_lora_rank, count)


def _macros(out: Any, cache_format: str, kv_lora_rank: int, count: int) -> dict[str, Any]:
    return {
        "FORMAT": cache_format.upper(),
        "LATENT": kv_lora_rank,
        "ROPE": out.shape[1] - kv_lora_rank,
        "COUNT": count,
        "OUT": out.dtype,
    }
