"""Device functions for Numba kernels: 8-bit floats to float32 and back, by integers.

Rounding is to nearest, ties to even, saturating; a NaN becomes code 0x7F.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from sandbox.cache_formats import Float8
from sandbox.kernels.numba_target import cuda


@functools.cache
def fp8_encode(kind: Float8) -> Any:
    """Device function `float32 -> uint8 code`."""
    mantissa, least = np.int32(kind.mantissa_bits), np.int32(kind.least_exponent)
    largest = np.float32(kind.largest)
    one, bias = np.int32(23), np.int32(127)
    # Adding and taking away 2^23 rounds to a whole number; no multiple of it is lost below 2^22.
    whole = np.float32(2.0**23)

    @cuda.jit(device=True)
    def encode(value):
        value = np.float32(value)
        if value != value:
            return np.uint8(0x7F)
        bits = value.view(np.uint32)
        magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF)).view(np.float32)
        if magnitude > largest:
            magnitude = largest
        exponent = np.int32(magnitude.view(np.uint32) >> np.uint32(one)) - bias
        if exponent < least:
            exponent = least
        unit = np.uint32((mantissa - exponent + bias) << one).view(np.float32)
        steps = np.int32((np.float32(magnitude * unit) + whole) - whole)
        code = np.int32(((exponent - least) << mantissa) + steps)
        return np.uint8(np.uint32(code) | np.uint32((bits >> np.uint32(24)) & np.uint32(0x80)))

    return encode


@functools.cache
def fp8_decode(kind: Float8) -> Any:
    """Device function `uint8 code -> float32`."""
    shift = np.uint32(23 - kind.mantissa_bits)
    infinity = np.uint32(kind.dtype.name == "float8_e5m2" and 0x7C)
    unit = np.float32(2.0 ** (127 + kind.least_exponent - 1))

    @cuda.jit(device=True)
    def decode(code):
        code = np.uint32(code)
        magnitude = np.uint32(code & np.uint32(0x7F))
        sign = np.uint32((code & np.uint32(0x80)) << np.uint32(24))
        if infinity:
            if magnitude == infinity:
                return np.uint32(sign | np.uint32(0x7F800000)).view(np.float32)
            if magnitude > infinity:
                return np.uint32(0x7FC00000).view(np.float32)
        elif magnitude == np.uint32(0x7F):
            return np.uint32(0x7FC00000).view(np.float32)
        scaled = np.float32(np.uint32(magnitude << shift).view(np.float32) * unit)
        return np.uint32(sign | scaled.view(np.uint32)).view(np.float32)

    return decode
