"""Partial attention states and the variants that merge them here, for the tests of both merges."""

import numpy as np
import pytest
from variants_here import here

from sandbox.cache_formats import E4M3
from sandbox.kernels.lse_merge import lse_merge, lse_merge_k

INF, NAN = np.float32(np.inf), np.float32(np.nan)


pair = pytest.mark.parametrize("variant", here(lse_merge, but=["raw_unfused"]))
coded = pytest.mark.parametrize("variant", here(lse_merge))
stacked = pytest.mark.parametrize("variant", here(lse_merge_k))


def state(shape, dtype=np.float32, seed=0):
    """A partial `[T, N, V]` and its LSE `[N, T]`."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape, np.float32).astype(dtype)
    return values, rng.standard_normal((shape[1], shape[0]), np.float32) * 2


def two_states(shape, dtype=np.float32, seed=1):
    """Arguments of `lse_merge` in order."""
    return [*state(shape, dtype, seed), *state(shape, dtype, seed + 1)]


def bits(array):
    return array.view(f"u{array.dtype.itemsize}")


def same(got, want):
    """Bit for bit, or as one NaN another."""
    numbers = [each.astype(np.float32) for each in (got, want)]
    both_nan = np.isnan(numbers[0]) & np.isnan(numbers[1])
    np.testing.assert_array_equal(
        np.where(both_nan, 0, bits(got)), np.where(both_nan, 0, bits(want))
    )


def codes(values, scale):
    """E4M3 codes of value * (1 / scale) in float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        return E4M3.encode(values.astype(np.float32) * (np.float32(1) / np.float32(scale)))
