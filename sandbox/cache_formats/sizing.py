"""What a cache in a format takes and holds, and the descale that fits its data."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from sandbox import arrays
from sandbox.cache_formats.format import CacheFormat, RowWidths, Widths
from sandbox.cache_formats.registry import FORMATS, format_by_name

FLOATS = tuple(map(np.dtype, (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)))
FLOAT32 = np.finfo(np.float32)


def finite_amax(kv_c: Any, k_pe: Any, *, earlier: float = 0.0) -> float:
    """The largest magnitude of the finite values of latents and keys, as float32 has it.

    Args:
        kv_c, k_pe: floating-point arrays of any shape, of NumPy, CuPy, torch or JAX. On a GPU this
            waits for the result.
        earlier: the result for data seen before; this one is not below it.

    Raises:
        TypeError: `kv_c` or `k_pe` is no array of floating-point numbers.
        ValueError: they live on different devices, or `earlier` is negative or not finite.
    """
    if not 0 <= earlier <= FLOAT32.max:
        raise ValueError(f"the amax of earlier data is {earlier}, expected a finite magnitude")
    amax = float(np.float32(earlier))
    with arrays.borrow({"kv_c": kv_c, "k_pe": k_pe}) as borrowed:
        xp = borrowed.xp
        for name, values in borrowed.arrays.items():
            if not arrays.is_array(values):
                raise TypeError(f"{name} is {type(values).__name__}, expected an array")
            if values.dtype not in FLOATS:
                raise TypeError(f"{name} is {values.dtype}, expected floating-point numbers")
            if values.size:
                with np.errstate(over="ignore"):
                    magnitudes = xp.abs(values.astype(np.float32))
                finite = xp.where(xp.isfinite(magnitudes), magnitudes, np.float32(0))
                amax = max(amax, float(finite.max()))
    return amax


def choose_k_scale(kv_c: Any, k_pe: Any, cache_format: str, *, amax: float = 0.0) -> float:
    """The per-tensor descale `k_scale` that maps the largest value onto the largest code.

    It is `amax / 448` for `fp8_e4m3` and `amax / 57344` for `fp8_e5m2`, over the finite values of
    latent *and* key: one scale serves both, and the keys, which no norm bounds, are often the
    larger. With a scale from the latents alone they saturate.

    Args:
        kv_c: latents `[..., L]` as the cache gets them, of NumPy, CuPy, torch or JAX.
        k_pe: shared keys `[..., R]` after RoPE; `R` may be 0.
        cache_format: the name of a format with a per-tensor scale.
        amax: `finite_amax` of data seen before. Data in chunks: carry `amax = finite_amax(kv_c,
            k_pe, earlier=amax)` from chunk to chunk; the last chunk's scale is that of all.

    Returns:
        A number that float32 holds exactly; 1.0 where nothing is finite or all is zero.

    Raises:
        ValueError: `cache_format` is unknown or has no per-tensor scale, `amax` is negative or not
            finite, or the arrays live on different devices.
        TypeError: `kv_c` or `k_pe` is no array of floating-point numbers.
    """
    fmt = format_by_name(cache_format)
    if not fmt.needs_scale:
        scaled = " or ".join(name for name, each in FORMATS.items() if each.needs_scale)
        raise ValueError(f"{cache_format} has no per-tensor scale, expected {scaled}")
    largest = finite_amax(kv_c, k_pe, earlier=amax)
    if largest == 0:
        return 1.0
    return float(max(np.float32(largest) / _largest_code(fmt), FLOAT32.tiny))


def _largest_code(fmt: CacheFormat) -> np.float32:
    return np.float32(ml_dtypes.finfo(fmt.fields(Widths(1, 0))["kv_c"].dtype).max)


def bytes_per_token(cache_format: str, dims: RowWidths, num_layers: int = 1) -> int:
    """Bytes that one token takes in the caches of `num_layers` layers.

    Heads do not count: all share one row, and each tensor-parallel rank holds a copy of it.

    Raises:
        ValueError: unknown format, dims that it has no layout for, or `num_layers` below 1.
        TypeError: `num_layers` is no integer.
    """
    return format_by_name(cache_format).row_bytes(dims) * _count("num_layers", num_layers)


@dataclass(frozen=True)
class Capacity:
    """What a cache of a given size holds.

    Attributes:
        blocks: whole blocks in one rank's memory, each with a page in every layer.
        tokens: tokens that all ranks together hold.
        bytes_used: bytes of one rank that the blocks take.
        bytes_left: bytes of one rank that are too few for another block.
    """

    blocks: int
    tokens: int
    bytes_used: int
    bytes_left: int


def capacity(
    memory_bytes: int,
    cache_format: str,
    dims: RowWidths,
    *,
    block_size: int,
    num_layers: int = 1,
    ranks: int = 1,
) -> Capacity:
    """How many blocks and tokens fit into `memory_bytes` on each rank.

    Args:
        memory_bytes: bytes for the caches of all layers, on one rank.
        block_size: tokens in a block.
        num_layers: layers with a cache of this format.
        ranks: ranks that hold different tokens: data-parallel times context-parallel ones.
            Tensor-parallel ranks hold the same rows and do not count.

    Raises:
        ValueError: unknown format, dims that it has no layout for, negative memory, or another
            number below 1.
        TypeError: a number is no integer.
    """
    memory = _count("memory_bytes", memory_bytes, least=0)
    tokens_a_block = _count("block_size", block_size)
    block_bytes = tokens_a_block * bytes_per_token(cache_format, dims, num_layers)
    blocks, left = divmod(memory, block_bytes)
    tokens = blocks * tokens_a_block * _count("ranks", ranks)
    return Capacity(blocks, tokens, memory - left, left)


def _count(name: str, value: Any, least: int = 1) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} is {value!r}, expected an integer")
    number = operator.index(value)
    if number < least:
        raise ValueError(f"{name} is {number}, expected at least {least}")
    return number
