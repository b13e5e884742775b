"""Codes of a context's keys and values in Numba, in words of up to 8 bytes."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from sandbox.cache_formats import E4M3
from sandbox.kernels import numba_target
from sandbox.kernels.concat_context import concat_context_fp8
from sandbox.kernels.concat_insert.head_launch import codes_a_store, halves
from sandbox.kernels.numba_fp8 import fp8_encode
from sandbox.kernels.numba_math import decode
from sandbox.kernels.numba_target import cuda

LANES, WARPS = 32, 4
WORD_BYTES = 8


@functools.cache
def _kernel(dtype: np.dtype, elements: int) -> Any:
    decode_element, encode, one = decode(dtype), fp8_encode(E4M3), np.float32(1)
    bits = 8 * dtype.itemsize
    mask = np.uint64((1 << bits) - 1)

    @cuda.jit(device=True)
    def codes_of(word, scale):
        word, codes = np.uint64(word), np.uint64(0)
        for i in range(elements):
            x = decode_element((word >> np.uint64(bits * i)) & mask)
            codes |= np.uint64(encode(x * scale)) << np.uint64(8 * i)
        return codes

    @cuda.jit
    def fp8_vector(k_nope, k_pe, v, k_descale, v_descale, k_out, v_out):
        token, lane, warp = cuda.blockIdx.x, cuda.threadIdx.x, cuda.threadIdx.y
        heads, nope, rope = k_nope.shape[1], k_nope.shape[2], k_pe.shape[1]
        k_inverse, v_inverse = one / k_descale[0], one / v_descale[0]
        for head in range(warp, heads, WARPS):
            for place in range(lane, nope, LANES):
                k_out[token, head, place] = codes_of(k_nope[token, head, place], k_inverse)
            for place in range(lane, v.shape[2], LANES):
                v_out[token, head, place] = codes_of(v[token, head, place], v_inverse)
        for place in range(lane, rope, LANES):
            key = codes_of(k_pe[token, place], k_inverse)
            for head in range(warp, heads, WARPS):
                k_out[token, head, nope + place] = key

    return fp8_vector


@concat_context_fp8.variant("numba_vector", kind="numba", preference=8)
def numba_vector(
    k_nope: Any, k_pe: Any, v: Any, k_descale: Any, v_descale: Any, k_out: Any, v_out: Any
) -> None:
    """A block a token, a warp a head in 8-byte words, the key quantized once a warp."""
    if not k_nope.shape[0]:
        return
    item = k_nope.dtype.itemsize
    targets = [*halves(k_out, k_nope.shape[2]), v_out]
    elements = codes_a_store([k_nope, k_pe, v], targets, WORD_BYTES // item)
    word, codes = np.dtype(f"u{elements * item}"), np.dtype(f"u{elements}")
    numba_target.launch(
        _kernel(k_nope.dtype, elements),
        k_nope.shape[0],
        (LANES, WARPS),
        *(array.view(word) for array in (k_nope, k_pe, v)),
        k_descale,
        v_descale,
        *(array.view(codes) for array in (k_out, v_out)),
    )
