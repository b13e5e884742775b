"""Many small arrays in one int32 buffer, so that one copy takes them all to a device."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

ALIGNMENT = 4
"""int32 elements between the starts of two arrays are multiples of this: 16 bytes."""


@dataclass(frozen=True)
class Place:
    """Where an array stands in the buffer: its first int32 element, shape and element type."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def elements(self) -> int:
        """int32 elements that it takes."""
        return math.prod(self.shape) * self.dtype.itemsize // 4


@dataclass(frozen=True)
class Packed:
    """A buffer and the arrays in it, read by name: `packed["slot_mapping"]` is a view.

    Attributes:
        buffer: int32, one axis; NumPy's, or any array that can be sliced, viewed and reshaped.
        places: where each array stands.
    """

    buffer: Any
    places: Mapping[str, Place]

    def __getitem__(self, name: str) -> Any:
        place = self.places[name]
        flat = self.buffer[place.offset : place.offset + place.elements]
        return flat.view(place.dtype).reshape(place.shape)

    def moved(self, copy: Callable[[Any], Any]) -> Packed:
        """The same arrays in the buffer that `copy` makes of this one, such as `cupy.asarray`."""
        return Packed(copy(self.buffer), self.places)


def pack(arrays: Mapping[str, np.ndarray], buffer: np.ndarray | None = None) -> Packed:
    """Copy arrays of 4- and 8-byte elements into one buffer.

    Args:
        arrays: by name, in the order in which they are laid out.
        buffer: int32 buffer to use, at least as large as they need; None allocates.

    Raises:
        TypeError: elements of another size.
        ValueError: the buffer is too small.
    """
    places, end = {}, 0
    for name, array in arrays.items():
        if array.dtype.itemsize not in (4, 8):
            raise TypeError(f"{name} is {array.dtype}, expected elements of 4 or 8 bytes")
        places[name] = Place(end, array.shape, array.dtype)
        end += -(-places[name].elements // ALIGNMENT) * ALIGNMENT
    if buffer is None:
        buffer = np.zeros(end, np.int32)
    elif (
        buffer.dtype != np.int32
        or buffer.ndim != 1
        or len(buffer) < end
        or not buffer.flags.c_contiguous
    ):
        raise ValueError(
            f"buffer is {buffer.dtype} {buffer.shape}, expected {end} int32 or more, contiguous"
        )
    packed = Packed(buffer, places)
    for name, array in arrays.items():
        packed[name][...] = array
    return packed
