"""What the Numba variants of the inserts share: how arrays are cut into words, row arguments."""

from __future__ import annotations

from typing import Any

import numpy as np

from sandbox.cache_formats import FORMATS, CacheFormat, Widths
from sandbox.kernels.numba_cache_rows import code_bits
from sandbox.kernels.numba_cache_words import RowWords
from sandbox.kernels.numba_columns import array_or_empty, table_or_empty
from sandbox.kernels.vectors import widest_vector

WORD_BYTES = 8


def row_key(
    kv_c: Any, k_pe: Any, cache_format: str, tile_scale: str | None, **others: Any
) -> tuple[CacheFormat, Widths, np.dtype, str | None]:
    """What a kernel's rows are specialised for: format, widths, input dtype, rule for tiles."""
    widths = Widths(kv_c.shape[1], k_pe.shape[1])
    return FORMATS[cache_format], widths, kv_c.dtype, tile_scale


def row_words(elements: int, lanes: int, **arguments: Any) -> RowWords:
    """The same for rows in words of `elements` values, by `lanes` threads a row."""
    fmt, widths, dtype, tile_scale = row_key(**arguments)
    return RowWords(fmt, widths, dtype, elements, tile_scale, lanes)


def row_arrays(
    kv_c: Any,
    k_pe: Any,
    cache: Any,
    k_scale: Any,
    slot_mapping: Any,
    positions: Any = None,
    cos_sin: Any = None,
    **others: Any,
) -> tuple[Any, ...]:
    """A kernel's arguments for rows: `kv_c, k_pe, cache, k_scale, slot_mapping, positions,
    cos_sin`, empty arrays for None."""
    table = table_or_empty(slot_mapping, positions, cos_sin)
    return kv_c, k_pe, cache, array_or_empty(k_scale, cache), slot_mapping, *table


def elements_a_word(arguments: dict[str, Any], values: list[Any], codes: list[Any]) -> int:
    """Values in the widest words that every row, `values` of kv_c's dtype, E4M3 `codes`, allows."""
    fmt, widths, dtype, _ = row_key(**arguments)
    cache = arguments["cache"]
    elements = WORD_BYTES // dtype.itemsize
    if fmt.packed:
        fields = fmt.layout(widths)
        parts = [cache[..., f.offset : f.offset + f.nbytes] for f in fields]
        elements = min(elements, widest_vector(*parts) * 8 // code_bits(fmt))
    else:
        values = [*values, cache]
    values = [arguments["kv_c"], arguments["k_pe"], *values]
    return min(elements, widest_vector(*values) // dtype.itemsize, widest_vector(*codes))


def lanes_for(columns: int, elements: int) -> int:
    """Threads, a warp at most, for the words of so many columns."""
    return min(32, 1 << (columns // elements - 1).bit_length())


def torn_pairs(arguments: dict[str, Any], elements: int, coded: bool = False) -> str | None:
    """Why words of so many values cannot be turned or coded, or None."""
    packed = coded or FORMATS[arguments["cache_format"]].packed
    if elements > 1 or not (packed or arguments.get("positions") is not None):
        return None
    return "turns and encodes pairs in one word, but rows are aligned to one value only"


def in_words(array: Any, elements: int) -> Any:
    """The array as words of `elements` elements each."""
    return array.view(np.dtype(f"u{elements * array.dtype.itemsize}"))


def row_arrays_in_words(row: RowWords, **arguments: Any) -> tuple[Any, ...]:
    """As `row_arrays`, kv_c, k_pe and cache in the words of `row`."""
    words = {name: in_words(arguments[name], row.elements) for name in ("kv_c", "k_pe")}
    words["cache"] = arguments["cache"].view(np.dtype(f"u{row.unit}"))
    return row_arrays(**{**arguments, **words})


def without_values(k_nope: Any, q_out: Any, k_out: Any, **others: Any) -> dict[str, Any]:
    """What a prefill of codes takes more than one of bits, all of it empty."""
    nothing = array_or_empty(None, q_out)
    descales = dict.fromkeys(("q_descale", "k_descale", "v_descale"), nothing)
    return {"v": k_nope[..., :0], "v_out": k_out[..., :0], **descales}
