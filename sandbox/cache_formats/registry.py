"""The formats by name and by element type."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from sandbox.cache_formats.ds_mla import FP8_DS_MLA
from sandbox.cache_formats.format import CacheFormat
from sandbox.cache_formats.fp8 import E4M3, E5M2, per_tensor
from sandbox.cache_formats.per_token import INT4_PER_TOKEN, INT8_PER_TOKEN
from sandbox.cache_formats.plain import plain

FORMATS: dict[str, CacheFormat] = {
    fmt.name: fmt
    for fmt in (
        plain("float32", np.dtype(np.float32)),
        plain("float16", np.dtype(np.float16)),
        plain("bfloat16", np.dtype(ml_dtypes.bfloat16)),
        per_tensor("fp8_e4m3", E4M3),
        per_tensor("fp8_e5m2", E5M2),
        FP8_DS_MLA,
        INT8_PER_TOKEN,
        INT4_PER_TOKEN,
    )
}


def format_by_name(name: str) -> CacheFormat:
    """The format with this name.

    Raises:
        TypeError: `name` is no string.
        ValueError: no format has this name.
    """
    if not isinstance(name, str):
        raise TypeError(f"cache_format is {type(name).__name__}, expected a name")
    if name not in FORMATS:
        raise ValueError(f"cache_format is {name!r}, expected one of {', '.join(FORMATS)}")
    return FORMATS[name]


def format_of(cache_dtype: np.dtype) -> CacheFormat:
    """The format whose rows are plain elements of `cache_dtype`.

    Raises:
        TypeError: no plain format has this element type; a packed cache needs its format named.
    """
    for fmt in FORMATS.values():
        if fmt.storage == cache_dtype and not fmt.packed:
            return fmt
    known = ", ".join(fmt.name for fmt in FORMATS.values() if not fmt.packed)
    if cache_dtype == np.uint8:
        packed = ", ".join(fmt.name for fmt in FORMATS.values() if fmt.packed)
        raise TypeError(f"cache is uint8: cache_format must say which of {packed} it is")
    raise TypeError(f"cache is {cache_dtype}, expected one of {known}")


def format_named(name: str | None, cache_dtype: np.dtype) -> CacheFormat:
    """The format of a cache of `cache_dtype`: the one named, or for None the plain one.

    Raises:
        ValueError: no format has this name.
        TypeError: `name` is no string, or the format is stored in another element type.
    """
    if name is None:
        return format_of(cache_dtype)
    fmt = format_by_name(name)
    if fmt.storage != cache_dtype:
        raise TypeError(f"cache is {cache_dtype}, expected {fmt.storage} for {name}")
    return fmt
