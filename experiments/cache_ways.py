"""Ways to store rows and read them back: each format as it is meant, and known ways to go wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from sandbox.cache_formats import CacheFormat, choose_k_scale
from sandbox.dims import MLADims


@dataclass(frozen=True)
class Way:
    """Rows `[T, L + R]` to the float32 values that a reader has.

    Attributes:
        name: the format's name, and what is done otherwise than meant.
        format: what the cache is.
        as_meant: whether reader and writer agree and the scale is that of the data.
        meaning: the way in words.
        read_back: values of rows, in the same shape.
    """

    name: str
    format: CacheFormat
    as_meant: bool
    meaning: str
    read_back: Callable[[np.ndarray, MLADims], np.ndarray]


def ways(fmt: CacheFormat) -> Iterator[Way]:
    """The ways of one format."""
    if fmt.needs_scale:
        for suffix, meaning, choose in SCALES:
            read_back = partial(_per_tensor, fmt, choose)
            yield Way(fmt.name + suffix, fmt, not suffix, meaning, read_back)
    elif fmt.tile_scales:
        yield Way(fmt.name, fmt, True, "scales are powers of two", partial(_tiled, fmt, "pow2"))
        yield Way(
            f"{fmt.name} raw", fmt, True, "scales are amax / 448", partial(_tiled, fmt, "raw")
        )
        yield Way(
            f"{fmt.name} misread",
            fmt,
            False,
            "scales are amax / 448, the reader rounds them down to powers of two",
            partial(_misread, fmt),
        )
    else:
        yield Way(fmt.name, fmt, True, "", partial(_plain, fmt))


def _of_both(fmt: CacheFormat, latents: np.ndarray, keys: np.ndarray) -> float:
    return choose_k_scale(latents, keys, fmt.name)


def _of_latents(fmt: CacheFormat, latents: np.ndarray, keys: np.ndarray) -> float:
    return choose_k_scale(latents, keys[:, :0], fmt.name)


def _one(fmt: CacheFormat, latents: np.ndarray, keys: np.ndarray) -> float:
    return 1.0


SCALES = (
    ("", "k_scale from latents and keys", _of_both),
    (" k_scale=1", "not calibrated", _one),
    (" latent scale", "k_scale from the latents alone", _of_latents),
)


def _plain(fmt: CacheFormat, rows: np.ndarray, dims: MLADims) -> np.ndarray:
    return fmt.decode(fmt.encode(rows, dims), dims)


def _per_tensor(
    fmt: CacheFormat, choose: Callable[..., float], rows: np.ndarray, dims: MLADims
) -> np.ndarray:
    k_scale = choose(fmt, rows[:, : dims.L], rows[:, dims.L :])
    return fmt.decode(fmt.encode(rows, dims, k_scale=k_scale), dims, k_scale=k_scale)


def _tiled(fmt: CacheFormat, rule: str, rows: np.ndarray, dims: MLADims) -> np.ndarray:
    return fmt.decode(fmt.encode(rows, dims, tile_scale=rule), dims)


def _misread(fmt: CacheFormat, rows: np.ndarray, dims: MLADims) -> np.ndarray:
    stored = fmt.encode(rows, dims, tile_scale="raw")
    field = fmt.fields(dims)["kv_c_scales"]
    scales = stored[:, field.offset : field.offset + field.nbytes]
    exponents = np.ascontiguousarray(scales).view(np.uint32) & np.uint32(0x7F800000)
    scales[...] = exponents.view(np.uint8)
    return fmt.decode(stored, dims)
