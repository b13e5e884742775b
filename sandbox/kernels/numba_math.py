"""Device functions for Numba kernels: elements of a cache dtype to float32 and back.

`to_float32` and `from_float32` work on elements as `numba_target.launch` hands them over: float32
and float16 as they are, bf16 as uint16 codes. `decode` and `encode` work on the codes of any of
them, uint16 or uint32, for kernels that move whole words. Rounding is to nearest, ties to even.
"""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np

from sandbox.kernels.numba_target import cuda

BF16 = np.dtype(ml_dtypes.bfloat16)


@functools.cache
def to_float32(dtype: np.dtype) -> Any:
    """Device function `element -> float32`."""
    if dtype == BF16:
        return decode(dtype)

    @cuda.jit(device=True)
    def to(element):
        return np.float32(element)

    return to


@functools.cache
def from_float32(dtype: np.dtype) -> Any:
    """Device function `float32 -> element`."""
    if dtype == BF16:
        return encode(dtype)
    kind = dtype.type

    @cuda.jit(device=True)
    def rounded(value):
        return kind(value)

    return rounded


@functools.cache
def decode(dtype: np.dtype) -> Any:
    """Device function `code -> float32`."""
    if dtype == BF16:

        @cuda.jit(device=True)
        def of_bf16(code):
            return np.uint32(np.uint32(code) << np.uint32(16)).view(np.float32)

        return of_bf16
    if dtype == np.float16:  # by hand: Numba cannot view an integer as float16

        @cuda.jit(device=True)
        def of_fp16(code):
            code = np.uint32(code)
            sign = np.uint32((code & np.uint32(0x8000)) << np.uint32(16))
            magnitude = np.uint32((code & np.uint32(0x7FFF)) << np.uint32(13))
            if magnitude >= np.uint32(0x0F800000):  # infinities and NaNs
                return np.uint32(sign | magnitude | np.uint32(0x7F800000)).view(np.float32)
            scaled = magnitude.view(np.float32) * np.float32(2.0**112)
            return np.uint32(sign | scaled.view(np.uint32)).view(np.float32)

        return of_fp16

    @cuda.jit(device=True)
    def of_fp32(code):
        return np.uint32(code).view(np.float32)

    return of_fp32


@functools.cache
def encode(dtype: np.dtype) -> Any:
    """Device function `float32 -> code`; a NaN stays a NaN."""
    if dtype == BF16:

        @cuda.jit(device=True)
        def to_bf16(value):
            bits = np.float32(value).view(np.uint32)
            high = np.uint32(bits >> np.uint32(16))
            if value != value:
                return np.uint16(high | np.uint32(0x40))
            return np.uint16((bits + np.uint32(0x7FFF) + (high & np.uint32(1))) >> np.uint32(16))

        return to_bf16
    code_kind, kind = np.dtype(f"u{dtype.itemsize}").type, dtype.type

    @cuda.jit(device=True)
    def to_code(value):
        return kind(value).view(code_kind)

    return to_code
