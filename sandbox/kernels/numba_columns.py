"""Device functions for Numba kernels: columns of heads and cache rows, as bits or as codes.

A column is copied, or a pair `(2i, 2i + 1)` of columns is turned by RoPE, an element at a time or
a word of several. With a `code`, a device function `(float32, scale) -> code`, codes come out;
without one the bits do, rounded once where they were turned, and `scale` means nothing.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from sandbox import arrays
from sandbox.cache_formats import Float8
from sandbox.kernels.numba_fp8 import fp8_encode
from sandbox.kernels.numba_math import decode, encode, from_float32, to_float32
from sandbox.kernels.numba_target import cuda


def array_or_empty(value: Any, like: Any, axes: int = 1, dtype: Any = np.float32) -> Any:
    """An empty array beside `like` for None, which Numba's device functions cannot compare."""
    return arrays.namespace(like).empty((0,) * axes, dtype) if value is None else value


def table_or_empty(slot_mapping: Any, positions: Any, cos_sin: Any) -> tuple[Any, Any]:
    """Positions and table, both empty for None."""
    if positions is None:
        return slot_mapping[:0], arrays.namespace(slot_mapping).empty((0, 0), np.float32)
    return positions, cos_sin


@functools.cache
def quotient(kind: Float8) -> Any:
    """Device function `(value, scale) -> code of value / scale`."""
    encode_fp8 = fp8_encode(kind)

    @cuda.jit(device=True)
    def code(value, scale):
        return encode_fp8(np.float32(value / scale))

    return code


@functools.cache
def product(kind: Float8) -> Any:
    """Device function `(value, inverse) -> code of value * inverse`."""
    encode_fp8 = fp8_encode(kind)

    @cuda.jit(device=True)
    def code(value, inverse):
        return encode_fp8(np.float32(value * inverse))

    return code


@functools.cache
def scalar() -> Any:
    """Device function: the number in an array of one element, 1 where it is empty."""

    @cuda.jit(device=True)
    def number(values):
        return values[0] if values.shape[0] > 0 else np.float32(1)

    return number


@functools.cache
def inverse() -> Any:
    """Device function: the reciprocal of the number in an array of one element, or 1."""
    number = scalar()

    @cuda.jit(device=True)
    def reciprocal(values):
        return np.float32(np.float32(1) / number(values))

    return reciprocal


@functools.cache
def rotater() -> Any:
    """Device function: the float32 pair `(x, y)` turned by the angle of its token's position.

    `table` is `(positions, cos_sin)`. Without rows in it the pair is as it was; NaN for a position
    that it does not have.
    """

    @cuda.jit(device=True)
    def rotate(x, y, pair, token, table):
        positions, cos_sin = table
        if cos_sin.shape[0] == 0:
            return x, y
        cosine = sine = np.float32(np.nan)
        position = positions[token]
        if position >= 0 and position < cos_sin.shape[0]:
            cosine = cos_sin[position, pair]
            sine = cos_sin[position, cos_sin.shape[1] // 2 + pair]
        return x * cosine - y * sine, x * sine + y * cosine

    return rotate


@functools.cache
def copier(dtype: np.dtype, code: Any = None) -> Any:
    """Device function `(element, scale) -> element or code`."""
    to = to_float32(dtype)

    @cuda.jit(device=True)
    def copied(element, scale):
        return element

    @cuda.jit(device=True)
    def coded(element, scale):
        return code(to(element), scale)

    return coded if code else copied


@functools.cache
def turner(dtype: np.dtype, code: Any = None) -> Any:
    """Device function `(even, odd, scale, pair, token, table) -> two elements or codes`."""
    to, back, rotate = to_float32(dtype), from_float32(dtype), rotater()

    @cuda.jit(device=True)
    def turned(even, odd, scale, pair, token, table):
        if table[1].shape[0] == 0:
            return even, odd
        x, y = rotate(to(even), to(odd), pair, token, table)
        return back(x), back(y)

    @cuda.jit(device=True)
    def coded(even, odd, scale, pair, token, table):
        x, y = rotate(to(even), to(odd), pair, token, table)
        return code(x, scale), code(y, scale)

    return coded if code else turned


@functools.cache
def word_pair(dtype: np.dtype, elements: int, turned: bool) -> Any:
    """Device function `(word, i) -> pair number i` of a word in float32.

    If `turned`, `(word, i, place, token, table)`, the pair rotated as that of word number `place`.
    """
    of_code, rotate = decode(dtype), rotater()
    bits, pairs = 8 * dtype.itemsize, elements // 2
    mask = np.uint64((1 << bits) - 1)

    @cuda.jit(device=True)
    def straight(word, i):
        word = np.uint64(word)
        even = of_code((word >> np.uint64(2 * i * bits)) & mask)
        odd = of_code((word >> np.uint64((2 * i + 1) * bits)) & mask)
        return even, odd

    @cuda.jit(device=True)
    def rotated(word, i, place, token, table):
        x, y = straight(word, i)
        return rotate(x, y, place * pairs + i, token, table)

    return rotated if turned else straight


@functools.cache
def word_copier(dtype: np.dtype, elements: int, code: Any = None, code_bits: int = 8) -> Any:
    """Device function `(word, scale) -> the word, or its codes`."""
    if code:
        return _word_codes(word_pair(dtype, elements, False), elements, code, code_bits)

    @cuda.jit(device=True)
    def copied(word, scale):
        return word

    return copied


@functools.cache
def word_turner(dtype: np.dtype, elements: int, code: Any = None, code_bits: int = 8) -> Any:
    """Device function `(word, scale, place, token, table) -> word or codes`, its pairs turned."""
    pair_of = word_pair(dtype, elements, True)
    if code:
        return _word_codes(pair_of, elements, code, code_bits)
    to_code, bits, pairs = encode(dtype), 8 * dtype.itemsize, elements // 2

    @cuda.jit(device=True)
    def turned(word, scale, place, token, table):
        if table[1].shape[0] == 0:
            return word
        codes = np.uint64(0)
        for i in range(pairs):
            x, y = pair_of(word, i, place, token, table)
            codes |= np.uint64(to_code(x)) << np.uint64(2 * i * bits)
            codes |= np.uint64(to_code(y)) << np.uint64((2 * i + 1) * bits)
        return codes

    return turned


def _word_codes(pair_of: Any, elements: int, code: Any, code_bits: int) -> Any:
    pairs = elements // 2

    @cuda.jit(device=True)
    def coded(word, scale, *where):
        codes = np.uint32(0)
        for i in range(pairs):
            x, y = pair_of(word, i, *where)
            low, high = np.uint32(2 * i * code_bits), np.uint32((2 * i + 1) * code_bits)
            even, odd = np.uint32(code(x, scale)), np.uint32(code(y, scale))
            codes = np.uint32(codes | (even << low) | (odd << high))
        return codes

    return coded
