"""Merges to E4M3 codes: what is exact, what saturates, what NaN and empty states become."""

import numpy as np
import pytest
from lse_merge_states import (
    INF,
    NAN,
    bits,
    coded,
    codes,
    pair,
    stacked,
    state,
    two_states,
)
from variants_here import here

from sandbox.arrays import bfloat16
from sandbox.kernels.lse_merge import lse_merge, lse_merge_k

EDGES = [0, -0.0, 448, 449, 464, 465, -464, -465, 1e30, -1e30, np.inf, -np.inf, np.nan, -np.nan]
EDGES += [2**-9, 2**-10, 1.5 * 2**-9, -(2**-10), 2**-30, 1e-40, 1.0625, 1.1875, 17, -19, 0.1, 3]
"""Around the largest number, the subnormals and the ties of E4M3."""

LARGE = pytest.mark.parametrize("variant", here(lse_merge, kinds=["cuda", "torch"]))


def edges(dtype, scale):
    with np.errstate(over="ignore"):
        return (np.array(EDGES, np.float32) * np.float32(scale)).astype(dtype).reshape(1, 2, -1)


def nothing(values, garbage, lse):
    return np.full_like(values, garbage), np.full((2, 1), lse, np.float32)


@coded
class TestCodes:
    @pytest.mark.parametrize("dtype", [np.float32, np.float16, bfloat16])
    @pytest.mark.parametrize("scale", [1.0, 0.3, 0.05, 3.7, 2.0**-3])
    def test_a_state_alone_becomes_its_codes(self, variant, dtype, scale):
        values, lse = edges(dtype, scale), np.array([[-1234.5], [1e4]], np.float32)
        empty = nothing(values, np.nan, INF if scale > 1 else -INF)
        for states in ((values, lse, *empty), (*empty, values, lse)):
            out, out_lse = lse_merge(*states, output_scale=scale, variant=variant)
            assert out.dtype == np.uint8
            np.testing.assert_array_equal(out, codes(values, scale))
            np.testing.assert_array_equal(bits(out_lse), bits(lse))

    @pytest.mark.parametrize("garbage", [np.nan, np.inf, 7.0])
    def test_two_empty_states_are_code_0(self, variant, garbage):
        values = np.full((1, 2, 24), garbage, np.float16)
        for left, right in ((-INF, -INF), (INF, -INF), (INF, INF)):
            states = (*nothing(values, garbage, left), *nothing(values, garbage, right))
            out, lse = lse_merge(*states, output_scale=0.3, variant=variant)
            assert not out.any()
            assert (lse == -np.inf).all()

    def test_a_nan_is_one_code_and_stays_where_it_is(self, variant):
        prefix, prefix_lse, suffix, suffix_lse = two_states((3, 2, 16), bfloat16)
        prefix[0, 1, 3], suffix[2, 0, 5] = NAN, -NAN
        prefix_lse[0, 2], suffix_lse[0, 2] = 1e4, -1e4
        suffix_lse[1, 1] = NAN
        states = prefix, prefix_lse, suffix, suffix_lse
        out, lse = lse_merge(*states, output_scale=0.05, variant=variant)
        want = np.zeros((3, 2, 16), bool)
        want[0, 1, 3] = want[2, 0, 5] = want[1, 1] = True
        np.testing.assert_array_equal(out == 0x7F, want)
        assert not (out == 0xFF).any()
        np.testing.assert_array_equal(np.argwhere(np.isnan(lse)), [[1, 1]])

    def test_strides_and_lse_in_place(self, variant):
        prefix, prefix_lse, suffix, suffix_lse = two_states((3, 2, 16), bfloat16)
        expected = lse_merge(
            prefix, prefix_lse, suffix, suffix_lse, output_scale=0.05, variant=variant
        )
        wide = np.full((2, 3, 21), 0xAB, np.uint8)
        view = wide[..., 3:19].swapaxes(0, 1)
        out, lse = lse_merge(
            *(prefix, prefix_lse.copy(), suffix, suffix_lse),
            out=view,
            out_lse=suffix_lse,
            output_scale=0.05,
            variant=variant,
        )
        assert out is view
        np.testing.assert_array_equal(out, expected[0])
        np.testing.assert_array_equal(lse, expected[1])
        assert (wide[..., :3] == 0xAB).all()
        assert (wide[..., 19:] == 0xAB).all()


@pair
@pytest.mark.parametrize("scale", [0.01, 0.3])
def test_codes_are_of_the_float32_mean(variant, scale):
    states = two_states((5, 3, 32), bfloat16)
    single = [each.astype(np.float32) for each in states]
    mean, expected_lse = lse_merge(*single, variant=variant)
    out, lse = lse_merge(*states, output_scale=scale, variant=variant)
    np.testing.assert_array_equal(out, codes(mean, scale))
    np.testing.assert_array_equal(lse, expected_lse)
    assert (out != codes(mean.astype(bfloat16), scale)).any(), "rounding twice would show"


@LARGE
@pytest.mark.parametrize("dtype", [np.float16, bfloat16])
def test_every_value_of_16_bits(variant, dtype):
    values = np.arange(2**16, dtype=np.uint16).view(dtype).reshape(8, 64, 128)
    lse = np.zeros((64, 8), np.float32)
    empty = np.full_like(values, np.nan), np.full_like(lse, -INF)
    out = lse_merge(values, lse, *empty, output_scale=0.3, return_lse=False, variant=variant)
    np.testing.assert_array_equal(out, codes(values, 0.3))


def test_two_launches_are_two_roundings():
    """Where fusion does not only save time."""
    states = two_states((16, 3, 32), bfloat16)
    fused, unfused = (
        lse_merge(*states, output_scale=0.01, variant=variant, return_lse=False)
        for variant in ("reference", "raw_unfused")
    )
    mean = lse_merge(*states, return_lse=False, variant="reference")
    np.testing.assert_array_equal(unfused, codes(mean, 0.01))
    assert 0 < (fused != unfused).sum() < fused.size // 10


@pytest.mark.parametrize("variant", ["reference", "raw_vector", "torch"])
def test_any_kind_of_scale(variant):
    states = two_states((3, 2, 16))
    expected = lse_merge(*states, output_scale=0.125, return_lse=False, variant=variant)
    kinds = [np.float64(0.125), np.float32([0.125]), np.array(0.125), bfloat16.type(0.125)]
    for scale in kinds:
        out = lse_merge(*states, output_scale=scale, return_lse=False, variant=variant)
        np.testing.assert_array_equal(out, expected)


def test_torch_tensors():
    torch = pytest.importorskip("torch")
    states = two_states((3, 2, 16))
    expected, _ = lse_merge(*states, output_scale=0.05)
    out, lse = lse_merge(*map(torch.from_numpy, states), output_scale=torch.tensor(0.05))
    assert out.dtype == torch.uint8
    assert lse.dtype == torch.float32
    np.testing.assert_array_equal(out.numpy(), expected)


@stacked
class TestStackedCodes:
    @pytest.mark.parametrize("dtype", [np.float32, bfloat16])
    def test_a_state_alone_becomes_its_codes(self, variant, dtype):
        values = edges(dtype, 0.3)
        partials = np.full((4, *values.shape), np.nan, dtype)
        lses = np.repeat([INF, -INF, INF, -INF], 2).reshape(4, 2, 1)
        partials[2], lses[2] = values, -77.0
        out, lse = lse_merge_k(partials, lses, output_scale=0.3, variant=variant)
        np.testing.assert_array_equal(out, codes(values, 0.3))
        assert (lse == -77).all()

    def test_codes_are_of_the_float32_mean(self, variant):
        partials, lses = (
            np.stack(each) for each in zip(*(state((3, 2, 40), bfloat16, s) for s in range(3)))
        )
        mean = lse_merge_k(partials, lses, out_dtype="float32", variant=variant, return_lse=False)
        out, _ = lse_merge_k(partials, lses, output_scale=0.01, variant=variant)
        np.testing.assert_array_equal(out, codes(mean, 0.01))

    def test_nan_and_no_state(self, variant):
        partials, lses = np.ones((3, 3, 1, 40), np.float32), np.zeros((3, 1, 3), np.float32)
        lses[:, 0, 0], partials[:, 0] = (INF, -INF, -INF), NAN
        lses[1, 0, 1] = NAN
        partials[2, 2, 0, 7], lses[2, 0, 2] = NAN, -1e4
        out, lse = lse_merge_k(partials, lses, output_scale=1.0, variant=variant)
        one = codes(np.ones(1), 1.0)[0]
        assert not out[0].any()
        assert (out[1] == 0x7F).all()
        np.testing.assert_array_equal(out[2, 0], [0x7F if i == 7 else one for i in range(40)])
        np.testing.assert_array_equal(np.isnan(lse), [[False, True, False]])
        assert lse[0, 0] == -np.inf
