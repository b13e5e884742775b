"""The 4-bit float E2M1: values to codes and back, two codes a byte.

A code is a sign, two bits of exponent and one of mantissa; its magnitude is 0, 0.5, 1, 1.5, 2, 3, 4
or 6. There is no infinity and no NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sandbox import arrays

VALUES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
LARGEST = VALUES[-1]
TIES = (VALUES[1:] + VALUES[:-1]) / 2
"""Halfway from each magnitude to the next."""


def encode(values: Any) -> Any:
    """float32 values to codes 0 to 15, uint8: to nearest, ties to even, saturating.

    A NaN becomes 0, whatever its sign; the zeros and what rounds to them keep theirs.
    """
    xp = arrays.namespace(values)
    magnitude = xp.abs(values)
    codes = xp.zeros(values.shape, np.uint8)
    with np.errstate(invalid="ignore"):
        for lower, tie in enumerate(TIES):
            codes += magnitude >= tie if lower % 2 else magnitude > tie
    codes |= xp.signbit(values).astype(np.uint8) << np.uint8(3)
    return xp.where(xp.isnan(values), np.uint8(0), codes)


def decode(codes: Any) -> Any:
    """Codes 0 to 15 to float32 values, exactly."""
    xp = arrays.namespace(codes)
    return xp.asarray(np.concatenate([VALUES, -VALUES]))[codes]


def pack(codes: Any) -> Any:
    """Codes `[..., 2 n]` to bytes `[..., n]`, the first of two in the low bits."""
    return codes[..., 0::2] | codes[..., 1::2] << np.uint8(4)


def unpack(packed: Any) -> Any:
    """Bytes `[..., n]` to codes `[..., 2 n]`."""
    xp = arrays.namespace(packed)
    pairs = xp.stack([packed & np.uint8(0xF), packed >> np.uint8(4)], axis=-1)
    return pairs.reshape(*packed.shape[:-1], 2 * packed.shape[-1])
