"""Byte layouts of one row of the latent cache: size, encode, decode, in exact NumPy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from sandbox.dims import MLADims


@dataclass(frozen=True)
class Field:
    """One run of equal elements inside a row: `count` elements of `dtype` from byte `offset`."""

    name: str
    offset: int
    dtype: np.dtype
    count: int

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * self.count


@dataclass(frozen=True)
class CacheFormat:
    """How a latent row `[kv_c | k_pe]` is stored.

    A cache is an array `[num_blocks, block_size, row_elements(dims)]` of `storage` elements. For
    16- and 32-bit formats that is one element a value; packed formats store `uint8` codes.

    Attributes:
        name: the name used in the API, in tables and in reports.
        storage: element type of the cache array.
        layout: fields of a row for given dims; they tile the row without holes.
        needs_scale: whether encode and decode take a per-tensor descale `k_scale`
            (stored = value / k_scale, read = code * k_scale).
    """

    name: str
    storage: np.dtype
    layout: Callable[[MLADims], tuple[Field, ...]]
    encode_row: Callable[[CacheFormat, np.ndarray, MLADims, float | None], np.ndarray]
    decode_row: Callable[[CacheFormat, np.ndarray, MLADims, float | None], np.ndarray]
    needs_scale: bool = False

    def row_bytes(self, dims: MLADims) -> int:
        """Bytes of one token's row."""
        return sum(field.nbytes for field in self.layout(dims))

    def row_elements(self, dims: MLADims) -> int:
        """Last dimension of the cache array."""
        return self.row_bytes(dims) // self.storage.itemsize

    def cache_shape(self, dims: MLADims, num_blocks: int, block_size: int) -> tuple[int, int, int]:
        return num_blocks, block_size, self.row_elements(dims)

    def encode(
        self, rows: np.ndarray, dims: MLADims, *, k_scale: float | None = None
    ) -> np.ndarray:
        """Rows `[..., E]` of numbers to stored rows `[..., row_elements]`, rounded to nearest even.

        Raises:
            ValueError: the last axis is not `E`, or `k_scale` is missing or not wanted.
        """
        if rows.shape[-1] != dims.E:
            raise ValueError(f"rows has last axis {rows.shape[-1]}, expected E = {dims.E}")
        self._check_scale(k_scale)
        return self.encode_row(self, rows, dims, k_scale)

    def decode(
        self, stored: np.ndarray, dims: MLADims, *, k_scale: float | None = None
    ) -> np.ndarray:
        """Stored rows `[..., row_elements]` to float64 values `[..., E]`, exactly.

        Raises:
            ValueError: wrong last axis, or `k_scale` is missing or not wanted.
            TypeError: wrong element type.
        """
        if stored.dtype != self.storage:
            raise TypeError(f"stored is {stored.dtype}, expected {self.storage} for {self.name}")
        if stored.shape[-1] != self.row_elements(dims):
            raise ValueError(
                f"stored has last axis {stored.shape[-1]}, expected {self.row_elements(dims)} "
                f"for {self.name}"
            )
        self._check_scale(k_scale)
        return self.decode_row(self, stored, dims, k_scale)

    def _check_scale(self, k_scale: float | None) -> None:
        if self.needs_scale and k_scale is None:
            raise ValueError(f"k_scale is missing: {self.name} stores value / k_scale")
        if not self.needs_scale and k_scale is not None:
            raise ValueError(f"k_scale is {k_scale}, but {self.name} has no scale")


def _plain_layout(dtype: np.dtype) -> Callable[[MLADims], tuple[Field, ...]]:
    def layout(dims: MLADims) -> tuple[Field, ...]:
        latent = Field("kv_c", 0, dtype, dims.L)
        return latent, Field("k_pe", latent.nbytes, dtype, dims.R)

    return layout


def _plain(name: str, dtype: np.dtype) -> CacheFormat:
    return CacheFormat(
        name=name,
        storage=dtype,
        layout=_plain_layout(dtype),
        encode_row=lambda fmt, rows, dims, k_scale: rows.astype(fmt.storage),
        decode_row=lambda fmt, stored, dims, k_scale: stored.astype(np.float64),
    )


FORMATS: dict[str, CacheFormat] = {
    fmt.name: fmt
    for fmt in (
        _plain("float32", np.dtype(np.float32)),
        _plain("float16", np.dtype(np.float16)),
        _plain("bfloat16", np.dtype(ml_dtypes.bfloat16)),
    )
}


def format_of(cache_dtype: np.dtype) -> CacheFormat:
    """The format whose rows are plain elements of `cache_dtype`.

    Raises:
        TypeError: no plain format has this element type; a packed cache needs its format named.
    """
    for fmt in FORMATS.values():
        if fmt.storage == cache_dtype:
            return fmt
    known = ", ".join(FORMATS)
    raise TypeError(f"cache is {cache_dtype}, expected one of {known}")
