"""What a cache format is: the byte layout of one row of the latent cache, its encode and decode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


class RowWidths(Protocol):
    """What a layout depends on: `MLADims`, or `Widths` where only a row is known."""

    @property
    def L(self) -> int: ...
    @property
    def R(self) -> int: ...


@dataclass(frozen=True)
class Widths:
    """Elements of the latent and of the shared key in one row."""

    L: int
    R: int


@dataclass(frozen=True)
class Field:
    """One run of equal elements inside a row: `count` elements of `dtype` from byte `offset`.

    Codes are `float8_e4m3fn`, `float8_e5m2` or `int8`; a `uint8` element is two int4 codes, the
    first value in the low nibble.
    """

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
        alignment: bytes that the address of every row must be a multiple of.
        refuses: why dims have no layout, or None.
        tile_scales: rules by which `encode` may choose the scales of tiles, the default first.
        float8: name of the 8-bit float that all of a row's codes are, if they are.
    """

    name: str
    storage: np.dtype
    layout: Callable[[RowWidths], tuple[Field, ...]]
    encode_row: Callable[..., Any]
    decode_row: Callable[..., Any]
    needs_scale: bool = False
    alignment: int = 1
    refuses: Callable[[RowWidths], str | None] = lambda dims: None
    tile_scales: tuple[str, ...] = ()
    float8: str | None = None

    @property
    def packed(self) -> bool:
        """Whether rows are codes, to be restored before they are numbers."""
        return self.storage == np.uint8

    def row_bytes(self, dims: RowWidths) -> int:
        """Bytes of one token's row; ValueError where these dims have no layout."""
        if not (_whole(dims.L, 1) and _whole(dims.R, 0)) or dims.R % 2:
            raise ValueError(
                f"L is {dims.L!r} and R is {dims.R!r}, expected a positive and an even whole number"
            )
        if reason := self.refuses(dims):
            raise ValueError(f"{self.name} has no layout for L = {dims.L}, R = {dims.R}: {reason}")
        return sum(field.nbytes for field in self.layout(dims))

    def row_elements(self, dims: RowWidths) -> int:
        """Last dimension of the cache array."""
        return self.row_bytes(dims) // self.storage.itemsize

    def cache_shape(
        self, dims: RowWidths, num_blocks: int, block_size: int
    ) -> tuple[int, int, int]:
        return num_blocks, block_size, self.row_elements(dims)

    def widths(self, row_elements: int, L: int) -> Widths:
        """What is in rows of so many elements, `L` of which are the latent.

        Raises:
            ValueError: no `R` gives such rows.
        """
        sizes = [sum(f.nbytes for f in self.layout(Widths(L, R))) for R in (0, 2)]
        R, rest = divmod(2 * (row_elements * self.storage.itemsize - sizes[0]), sizes[1] - sizes[0])
        found = Widths(L, R)
        if L <= 0 or R < 0 or R % 2 or rest or self.row_elements(found) != row_elements:
            raise ValueError(
                f"rows of {row_elements} elements are no {self.name} rows with kv_lora_rank {L}"
            )
        return found

    def check_float8(self, array: Any, name: str) -> None:
        """TypeError for an array, of any library, whose own dtype is another 8-bit float."""
        dtype = str(getattr(array, "dtype", "")).removeprefix("torch.")
        if self.float8 and dtype.startswith("float8") and dtype != self.float8:
            raise TypeError(f"{name} is {dtype}, but {self.name} is {self.float8}")

    def fields(self, dims: RowWidths) -> dict[str, Field]:
        """The layout by the fields' names."""
        self.row_bytes(dims)
        return {field.name: field for field in self.layout(dims)}

    def encode(
        self,
        rows: Any,
        dims: RowWidths,
        *,
        k_scale: float | None = None,
        tile_scale: str | None = None,
    ) -> Any:
        """Rows `[..., L + R]` of numbers to stored rows `[..., row_elements]`.

        Values are rounded to float32, then to nearest even. NumPy or CuPy in, the same out.

        Args:
            k_scale: the descale of a format that needs one, taken as float32.
            tile_scale: one of `tile_scales`; None is the first.

        Raises:
            ValueError: the last axis is not `L + R`, the dims have no layout, `k_scale` is not a
                positive, finite float32, or it or `tile_scale` is missing, unknown or not wanted.
        """
        if rows.shape[-1] != dims.L + dims.R:
            raise ValueError(
                f"rows has last axis {rows.shape[-1]}, expected L + R = {dims.L + dims.R}"
            )
        self.row_bytes(dims)
        self.check_scales(k_scale, tile_scale)
        options: dict[str, Any] = {}
        if self.needs_scale:
            options["k_scale"] = _positive(k_scale)
        if self.tile_scales:
            options["tile_scale"] = tile_scale or self.tile_scales[0]
        return self.encode_row(rows, dims, **options)

    def decode(self, stored: Any, dims: RowWidths, *, k_scale: float | None = None) -> Any:
        """Stored rows `[..., row_elements]` to float32 values `[..., L + R]`.

        These are the values that every reader has: a code times its scale is one float32 product.
        A reader that writes 16 bits rounds them once more.

        Raises:
            ValueError: wrong last axis, no layout for the dims, or `k_scale` is missing or not
                wanted.
            TypeError: wrong element type.
        """
        if stored.dtype != self.storage:
            raise TypeError(f"stored is {stored.dtype}, expected {self.storage} for {self.name}")
        if stored.shape[-1] != self.row_elements(dims):
            raise ValueError(
                f"stored has last axis {stored.shape[-1]}, expected {self.row_elements(dims)} "
                f"for {self.name}"
            )
        self.check_scales(k_scale, None)
        options = {"k_scale": np.float32(k_scale)} if self.needs_scale else {}
        return self.decode_row(stored, dims, **options)

    def check_scales(self, k_scale: Any, tile_scale: str | None = None) -> None:
        """ValueError for a scale that is missing or not wanted, or an unknown rule for tiles."""
        if self.needs_scale and k_scale is None:
            raise ValueError(f"k_scale is missing: {self.name} stores value / k_scale")
        if not self.needs_scale and k_scale is not None:
            raise ValueError(f"k_scale is given, but {self.name} has no per-tensor scale")
        if tile_scale is not None and tile_scale not in self.tile_scales:
            allowed = " or ".join(map(repr, self.tile_scales)) or "None: it has no tiles"
            raise ValueError(f"tile_scale is {tile_scale!r}, expected {allowed} for {self.name}")


def _whole(number: Any, least: int) -> bool:
    return isinstance(number, int | np.integer) and number >= least


def _positive(k_scale: Any) -> np.float32:
    with np.errstate(over="ignore"):
        scale = np.float32(k_scale)
    if isinstance(k_scale, bool) or scale.ndim or not 0 < scale < np.inf:
        raise ValueError(f"k_scale is {k_scale}, expected a positive, finite float32")
    return scale


def split(rows: Any, dims: RowWidths) -> tuple[Any, Any]:
    """Latent and key of rows, in float32."""
    values = rows.astype(np.float32)
    return values[..., : dims.L], values[..., dims.L :]
