"""Conversions of Numba kernels against NumPy's, for every 16-bit code."""

import numpy as np
import pytest

from sandbox.arrays import DTYPES
from sandbox.kernels import numba_math, numba_target

pytestmark = pytest.mark.skipif(
    not numba_target.SIMULATED or numba_target.cuda is None,
    reason="device functions are called from Python in the simulator only",
)

FLOATS = [DTYPES[name] for name in ("float32", "float16", "bfloat16")]


def same(got, want):
    bits = np.dtype(f"u{want.dtype.itemsize}")
    return ((got.view(bits) == want.view(bits)) | (np.isnan(got) & np.isnan(want))).all()


def bits32(rng):
    """Random float32 bits, and ties between two bf16 of every sign, exponent and mantissa."""
    ties = (np.arange(2**16, dtype=np.uint32) << 16) | np.uint32(0x8000)
    few = rng.choice(ties, 8192, replace=False)
    return np.concatenate([rng.integers(0, 2**32, 8192, dtype=np.uint32), few])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_codes_decode_exactly(dtype, rng):
    codes = bits32(rng) if dtype.itemsize == 4 else np.arange(2**16, dtype=np.uint16)
    decode = numba_math.decode(dtype)
    with np.errstate(all="ignore"):
        got = np.array([decode(code) for code in codes], np.float32)
        assert same(got, codes.view(dtype).astype(np.float32))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_values_round_to_nearest_even(dtype, rng):
    values = bits32(rng).view(np.float32)
    encode = numba_math.encode(dtype)
    with np.errstate(all="ignore"):
        codes = np.array([encode(value) for value in values], f"u{dtype.itemsize}")
        assert same(codes.view(dtype), values.astype(dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_elements_as_kernels_see_them_go_there_and_back(dtype, rng):
    elements = numba_target.bits(rng.standard_normal(64).astype(dtype))
    to, back = numba_math.to_float32(dtype), numba_math.from_float32(dtype)
    got = [back(to(element)) for element in elements]
    np.testing.assert_array_equal(np.array(got, elements.dtype), elements)
