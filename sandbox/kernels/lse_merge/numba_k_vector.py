"""Merge of stacked states in Numba, in words of up to 8 bytes."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from sandbox.kernels import numba_target
from sandbox.kernels.lse import by_token
from sandbox.kernels.lse_merge import lse_merge_k
from sandbox.kernels.lse_merge.launch import lanes_for, vector_elements
from sandbox.kernels.lse_merge.numba_k_scalar import lse_merger, summer
from sandbox.kernels.lse_merge.numba_merge import rounder, scalars
from sandbox.kernels.lse_merge.numba_vector import in_words
from sandbox.kernels.numba_columns import array_or_empty, inverse
from sandbox.kernels.numba_math import decode, encode
from sandbox.kernels.numba_target import cuda

THREADS = 128
WORD_BYTES = 8


@functools.cache
def _kernel(dtype: np.dtype, out_dtype: np.dtype, elements: int) -> Any:
    sum_weights, merged_lse, inverse_of = summer(), lse_merger(), inverse()
    of_code, to_code = decode(dtype), rounder(out_dtype, encode)
    in_word = np.dtype(f"u{elements * dtype.itemsize}").type
    in_code, in_bits = np.dtype(f"u{dtype.itemsize}").type, 8 * dtype.itemsize
    out_word, out_bits = np.dtype(f"u{elements * out_dtype.itemsize}").type, 8 * out_dtype.itemsize
    zero, minus_zero, nothing = np.float32(0), np.float32(-0.0), out_word(0)

    @cuda.jit
    def merge_k_vector(partials, lses, out, out_lse, to_natural, from_natural, output_scale):
        row = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
        token, head = row // out.shape[1], row % out.shape[1]
        if token >= out.shape[0]:
            return
        top, total = sum_weights(lses, token, head, to_natural)
        scale = inverse_of(output_scale)
        sums = cuda.local.array(elements, np.float32)
        for i in range(cuda.threadIdx.x, out.shape[2], cuda.blockDim.x):
            for e in range(elements):
                sums[e] = minus_zero  # -0 + x is x, the sign of a zero too
            for k in range(lses.shape[0]):
                lse = lses[k, token, head]
                if not math.isinf(lse):
                    weight = np.float32(math.exp((lse - top) * to_natural)) / total
                    word = partials[k, token, head, i]
                    for e in range(elements):
                        sums[e] += weight * of_code(in_code(word >> in_word(in_bits * e)))
            merged = nothing
            if total != zero:
                for e in range(elements):
                    merged |= out_word(out_word(to_code(sums[e], scale)) << out_word(out_bits * e))
            out[token, head, i] = merged
        if out_lse.shape[0] > 0 and cuda.threadIdx.x == 0:
            out_lse[token, head] = merged_lse(top, total, from_natural)

    return merge_k_vector


@lse_merge_k.variant("numba_vector", kind="numba", preference=8)
def numba_vector(
    partials: Any, lses: Any, out: Any, out_lse: Any, lse_layout: str, **arguments: Any
) -> None:
    """Part of a warp a row, in 8-byte words where rows allow, decoded and rounded in registers."""
    tokens, heads, head_dim = out.shape
    if not tokens * heads:
        return
    elements = vector_elements(partials, out, limit=WORD_BYTES)
    lanes = lanes_for(head_dim // elements)
    numba_target.launch(
        _kernel(partials.dtype, out.dtype, elements),
        -(-tokens * heads * lanes // THREADS),
        (lanes, THREADS // lanes),
        in_words(partials, elements),
        by_token(lses, lse_layout),
        in_words(out, elements),
        by_token(array_or_empty(out_lse, lses, 2), lse_layout),
        *scalars(arguments, out),
    )
