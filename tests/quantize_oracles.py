"""Codes and scales by other codecs than the house's own, and the variants that can run here."""

import ml_dtypes
import numpy as np
import pytest
from variants_here import here

from sandbox.arrays import bfloat16
from sandbox.kernels import quantize_groups, quantize_nvfp4, quantize_static

F32 = np.float32
INF, NAN = np.inf, np.nan
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
EDGES = [448, 449, 464, 465, -1e30, INF, -INF, NAN, -NAN, 0, -0.0, 2**-10, 1.5 * 2**-9, 17, -19]


static = pytest.mark.parametrize("variant", here(quantize_static))
groups = pytest.mark.parametrize("variant", here(quantize_groups))
nvfp4 = pytest.mark.parametrize("variant", here(quantize_nvfp4))
same = np.testing.assert_array_equal


def values(shape, dtype=np.float32, seed=0):
    """Normal values of very different sizes, the largest first in some rows."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape, np.float32) * np.exp2(rng.integers(-9, 9, (shape[0], 1)))
    return x.astype(dtype)


@np.errstate(invalid="ignore")
def e4m3(numbers):
    """Codes by another codec than the house's own, which does not saturate."""
    numbers = np.asarray(numbers, np.float32)
    bits = np.clip(numbers, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.where(np.isnan(numbers), np.uint8(0x7F), bits)


@np.errstate(invalid="ignore")
def nearest_e2m1(numbers):
    """Codes by a search of the nearest magnitude; of two the even code's."""
    numbers = np.asarray(numbers, np.float64)
    magnitude = np.minimum(np.abs(numbers), 1e9)
    gaps = np.abs(np.nan_to_num(magnitude)[..., None] - MAGNITUDES)
    tied = gaps == gaps.min(axis=-1, keepdims=True)
    code = np.argmax(tied * (2 - np.arange(8) % 2), axis=-1) + 8 * np.signbit(numbers)
    return np.where(np.isnan(numbers), 0, code).astype(np.uint8)


def all_bfloat16():
    return np.arange(65536, dtype=np.uint16).view(bfloat16)


def unpacked(packed):
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)


def finite_amax(x, size):
    split = x.astype(np.float32).reshape(len(x), -1, size)
    return split, np.abs(np.where(np.isfinite(split), split, 0)).max(axis=-1)


@np.errstate(all="ignore")
def expected_groups(x, size, pow2=False):
    split, amax = finite_amax(x, size)
    scales = np.maximum(amax, F32(1e-10)) / F32(448)
    if pow2:
        mantissa, exponent = np.frexp(scales)  # in 0.5 to 1
        scales = np.ldexp(F32(1), exponent - (mantissa == 0.5)).astype(np.float32)
    return e4m3(split / scales[..., None]).reshape(x.shape), scales


@np.errstate(all="ignore")
def expected_nvfp4(x, global_scale):
    split, amax = finite_amax(x, 16)
    scales = e4m3(amax / F32(6) / F32(global_scale))
    steps = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * F32(global_scale)
    codes = nearest_e2m1(split / steps[..., None])
    codes[scales == 0] = 0
    return codes.reshape(x.shape), scales
