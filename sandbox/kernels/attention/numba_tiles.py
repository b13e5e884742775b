"""What both attentions share in Numba: tiles of rows and keys, a softmax over one after another.

A block has a tile of rows (queries or heads) and walks over tiles of keys. The threads of one
`threadIdx.y` have a row, thread `threadIdx.x` of them a key of each tile. All threads of a row keep
its largest score and its sum of weights, and come to the same numbers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from sandbox.cache_formats import E4M3
from sandbox.kernels.attention.checks import CODES
from sandbox.kernels.numba_fp8 import fp8_decode
from sandbox.kernels.numba_math import to_float32
from sandbox.kernels.numba_target import cuda

NOTHING = np.float32(-np.inf)
"""The score of a key that a row does not see."""
SHARED_BYTES = 48 << 10
"""Static shared memory that a block may have on every GPU."""


def tile(rows: int, keys: int, bytes_of: Callable[[int, int], int]) -> tuple[int, int] | None:
    """Rows and keys of a tile: those wanted, halved until `bytes_of(rows, keys)` fit a block; None
    where no tile does."""
    while bytes_of(rows, keys) > SHARED_BYTES:
        if rows == keys == 1:
            return None
        rows, keys = max(1, rows // 2), max(1, keys // 2)
    return rows, keys


def element_reader(dtype: np.dtype) -> Any:
    """Device function `element -> float32`, of numbers or of E4M3 codes."""
    return fp8_decode(E4M3) if dtype == CODES else to_float32(dtype)


@functools.cache
def dot(width: int) -> Any:
    """Device function: product of row `i` of one array and row `j` of another."""

    @cuda.jit(device=True)
    def product(left, i, right, j):
        total = np.float32(0)
        for column in range(width):
            total += left[i, column] * right[j, column]
        return total

    return product


@functools.cache
def highest() -> Any:
    """Device function: the largest of `top` and of a row's scores."""

    @cuda.jit(device=True)
    def largest(scores, row, top):
        for key in range(scores.shape[1]):
            if scores[row, key] > top:
                top = scores[row, key]
        return top

    return largest


@functools.cache
def weigher() -> Any:
    """Device function: weight of a score against the largest one, 0 for `NOTHING`."""

    @cuda.jit(device=True)
    def weight(score, top):
        if score == NOTHING:
            return np.float32(0)
        return np.float32(math.exp(score - top))

    return weight


@functools.cache
def adder() -> Any:
    """Device function `(weights, row, values, sums, shrink, total) -> total`.

    It adds a row's weighted values to its sums, in the columns of this thread, after the sums and
    the total so far have shrunk to a larger top score. The value of a key without weight, which is
    one that the row does not see, is not looked at.
    """
    zero = np.float32(0)

    @cuda.jit(device=True)
    def add(weights, row, values, sums, shrink, total):
        total = total * shrink
        for key in range(weights.shape[1]):
            total += weights[row, key]
        for column in range(cuda.threadIdx.x, sums.shape[1], cuda.blockDim.x):
            value = sums[row, column] * shrink
            for key in range(weights.shape[1]):
                if weights[row, key] != zero:
                    value += weights[row, key] * values[key, column]
            sums[row, column] = value
        return total

    return add


@functools.cache
def finisher() -> Any:
    """Device function: a row's natural LSE and what its sums are multiplied by, -inf and 0 where
    it has seen no key."""

    @cuda.jit(device=True)
    def finish(top, total):
        if total == np.float32(0):
            return NOTHING, np.float32(0)
        return top + np.float32(math.log(total)), np.float32(1) / total

    return finish
