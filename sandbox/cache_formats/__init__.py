"""Byte layouts of one row of the latent cache: size, encode, decode, exactly."""

from sandbox.cache_formats.format import CacheFormat, Field, RowWidths, Widths
from sandbox.cache_formats.fp8 import E4M3, E5M2, Float8
from sandbox.cache_formats.registry import FORMATS, format_by_name, format_named, format_of
from sandbox.cache_formats.sizing import (
    Capacity,
    bytes_per_token,
    capacity,
    choose_k_scale,
    finite_amax,
)

__all__ = [
    "E4M3",
    "E5M2",
    "FORMATS",
    "CacheFormat",
    "Capacity",
    "Field",
    "Float8",
    "RowWidths",
    "Widths",
    "bytes_per_token",
    "capacity",
    "choose_k_scale",
    "finite_amax",
    "format_by_name",
    "format_named",
    "format_of",
]
