"""What is special to the merges: field cases, empty and NaN states, identities."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lse_merge_states import INF, NAN, bits, pair, stacked, state

from sandbox.arrays import bfloat16
from sandbox.kernels.lse_merge import lse_merge, lse_merge_k, reference


def attention(logits, values):
    """One query's softmax over keys, in float64: output `[T, N, V]` and LSE `[N, T]`."""
    weights = np.exp(logits)
    total = weights.sum(-1)
    out = np.einsum("tnk,tnkv->tnv", weights, values) / total[..., None]
    return out.astype(np.float32), np.log(total).T.astype(np.float32)


EXTREMES = [0.0, -0.0, np.inf, -np.inf, 65504.0, 2.0**-24, -1.5, 3.0]


@pair
class TestEmptyStates:
    @pytest.mark.parametrize("dtype", [np.float32, np.float16, bfloat16])
    @pytest.mark.parametrize("none", [-INF, INF])
    @pytest.mark.parametrize("garbage", [np.nan, np.inf, 7.0])
    def test_the_other_state_comes_back_bit_for_bit(self, variant, dtype, none, garbage):
        values = np.array(EXTREMES * 2, np.float32).astype(dtype).reshape(2, 1, 8)
        lse = np.array([[1.1, -1e4]], np.float32)
        empty = np.full_like(values, garbage), np.full_like(lse, none)
        for states in ((values, lse, *empty), (*empty, values, lse)):
            out, out_lse = lse_merge(*states, variant=variant)
            np.testing.assert_array_equal(bits(out), bits(values))
            np.testing.assert_array_equal(bits(out_lse), bits(lse))

    @pytest.mark.parametrize("garbage", [0.0, np.nan, np.inf])
    def test_two_empty_states_give_exactly_zero(self, variant, garbage):
        empty = np.full((1, 1, 64), garbage, np.float16)
        for left, right in ((-INF, -INF), (INF, -INF), (-INF, INF), (INF, INF)):
            lses = [np.full((1, 1), side, np.float32) for side in (left, right)]
            out, lse = lse_merge(empty, lses[0], empty.copy(), lses[1], variant=variant)
            assert not bits(out).any()
            assert lse[0, 0] == -np.inf

    def test_empty_rows_leave_their_neighbours_alone(self, variant):
        (prefix, prefix_lse), (suffix, suffix_lse) = (state((8, 2, 16), seed=s) for s in (1, 2))
        expected, expected_lse = lse_merge(prefix, prefix_lse, suffix, suffix_lse, variant=variant)
        gone = np.arange(8) % 4 == 2
        prefix_lse[:, gone], suffix_lse[:, gone] = -INF, INF
        prefix[gone], suffix[gone] = NAN, INF
        out, lse = lse_merge(prefix, prefix_lse, suffix, suffix_lse, variant=variant)
        np.testing.assert_array_equal(bits(out[~gone]), bits(expected[~gone]))
        np.testing.assert_array_equal(lse[:, ~gone], expected_lse[:, ~gone])
        assert not bits(out[gone]).any()
        assert (lse[:, gone] == -np.inf).all()

    @pytest.mark.parametrize("other", [0.0, np.inf, -np.inf, np.nan])
    def test_nan_lse_is_never_taken_for_empty(self, variant, other):
        (prefix, prefix_lse), (suffix, suffix_lse) = (state((3, 2, 16), seed=s) for s in (3, 4))
        for first, second in ((np.nan, other), (other, np.nan)):
            prefix_lse[1, 2], suffix_lse[1, 2] = first, second
            out, lse = lse_merge(prefix, prefix_lse, suffix, suffix_lse, variant=variant)
            assert np.isnan(out[2, 1]).all()
            assert np.isnan(lse[1, 2])
            assert np.isnan(out).sum() == 16
            assert np.isnan(lse).sum() == 1


@pair
class TestFieldCases:
    def test_base_is_what_the_caller_says(self, variant):
        """Prefix of three keys with value 0, suffix of one with value 1, all logits 0."""
        prefix, suffix = np.zeros((1, 1, 16), np.float32), np.ones((1, 1, 16), np.float32)
        none = np.zeros((1, 1), np.float32)
        three = np.full((1, 1), np.log(3), np.float32)
        out, lse = lse_merge(prefix, three, suffix, none, variant=variant)
        np.testing.assert_allclose(out, 0.25, rtol=1e-6)
        np.testing.assert_allclose(lse, np.log(4), rtol=1e-6)
        three = np.full((1, 1), np.log2(3), np.float32)
        out, lse = lse_merge(prefix, three, suffix, none, lse_base="2", variant=variant)
        np.testing.assert_allclose(out, 0.25, rtol=1e-6)
        np.testing.assert_allclose(lse, 2.0, rtol=1e-6)
        out, lse = lse_merge(prefix, three, suffix, none, lse_base="e", variant=variant)
        np.testing.assert_allclose(out, 0.170, atol=5e-4)

    def test_layout_is_what_the_caller_says_where_no_shape_tells(self, variant):
        (prefix, prefix_lse), (suffix, suffix_lse) = (state((4, 4, 16), seed=s) for s in (5, 6))
        out, lse = lse_merge(prefix, prefix_lse, suffix, suffix_lse, variant=variant)
        weight = 1 / (1 + np.exp(suffix_lse - prefix_lse)).T[..., None]
        np.testing.assert_allclose(out, weight * prefix + (1 - weight) * suffix, atol=1e-6)
        by_token, by_token_lse = lse_merge(
            prefix, prefix_lse.T, suffix, suffix_lse.T, lse_layout="TN", variant=variant
        )
        np.testing.assert_array_equal(by_token, out)
        np.testing.assert_array_equal(by_token_lse, lse.T)
        swapped, _ = lse_merge(prefix, prefix_lse.T, suffix, suffix_lse.T, variant=variant)
        assert np.abs(swapped - out).max() > 0.1

    def test_two_chunks_of_any_scale_are_one_softmax(self, variant):
        rng = np.random.default_rng(7)
        scale = 0.3
        logits = scale * rng.standard_normal((3, 2, 10)) * 4
        values = rng.standard_normal((3, 2, 10, 16))
        expected, expected_lse = attention(logits, values)
        prefix, prefix_lse = attention(logits[..., :7], values[:, :, :7])
        suffix, suffix_lse = attention(logits[..., 7:], values[:, :, 7:])
        out, lse = lse_merge(prefix, prefix_lse, suffix, suffix_lse, variant=variant)
        np.testing.assert_allclose(out, expected, atol=1e-6)
        np.testing.assert_allclose(lse, expected_lse, atol=1e-6)

    def test_offsets_of_more_than_32_bits(self, variant):
        """Two tokens 2^31 + 8 elements apart, in memory of which only the touched pages exist."""
        stride = 2**31 + 8
        try:
            memory = np.empty(stride + 16, np.float16)
        except MemoryError as failure:
            pytest.skip(f"no address space for the view: {failure}")
        far = np.ndarray((2, 1, 16), np.float16, memory, 0, (stride * 2, 32, 2))
        (near, near_lse), (values, far_lse) = (state((2, 1, 16), np.float16, s) for s in (8, 9))
        far[...] = values
        expected, expected_lse = lse_merge(near, near_lse, values, far_lse, variant=variant)
        _, lse = lse_merge(near, near_lse, far, far_lse, out=far, variant=variant)
        np.testing.assert_array_equal(far, expected)
        np.testing.assert_array_equal(lse, expected_lse)

    @pytest.mark.parametrize("shape", [(0, 3, 16), (4, 0, 16), (1, 1, 1)])
    def test_no_rows_and_one_element(self, variant, shape):
        (prefix, prefix_lse), (suffix, suffix_lse) = (state(shape, seed=s) for s in (1, 2))
        out, lse = lse_merge(prefix, prefix_lse, suffix, suffix_lse, variant=variant)
        assert out.shape == shape
        np.testing.assert_allclose(lse, np.logaddexp(prefix_lse, suffix_lse), atol=1e-6)


@pair
class TestMemory:
    def test_in_place_on_one_side_each(self, variant):
        (prefix, prefix_lse), (suffix, suffix_lse) = (state((5, 3, 16), seed=s) for s in (1, 2))
        expected = lse_merge(prefix, prefix_lse, suffix, suffix_lse, variant=variant)
        before = prefix.copy(), suffix_lse.copy()
        out, lse = lse_merge(
            prefix, prefix_lse, suffix, suffix_lse, out=suffix, out_lse=prefix_lse, variant=variant
        )
        assert out is suffix
        assert lse is prefix_lse
        np.testing.assert_array_equal(out, expected[0])
        np.testing.assert_array_equal(lse, expected[1])
        np.testing.assert_array_equal(prefix, before[0])
        np.testing.assert_array_equal(suffix_lse, before[1])

    def test_columns_of_one_buffer(self, variant):
        """Neighbours between each other's rows share no memory, whatever their bounds say."""
        wide = state((5, 3, 48), bfloat16)[0]
        prefix, suffix, out = (wide[..., i : i + 16] for i in (0, 16, 32))
        (_, prefix_lse), (_, suffix_lse) = (state((5, 3, 16), seed=s) for s in (1, 2))
        expected = lse_merge(prefix.copy(), prefix_lse, suffix.copy(), suffix_lse, variant=variant)
        lse_merge(prefix, prefix_lse, suffix, suffix_lse, out=out, variant=variant)
        np.testing.assert_array_equal(out, expected[0])

    def test_without_lse(self, variant):
        (prefix, prefix_lse), (suffix, suffix_lse) = (state((5, 3, 16), seed=s) for s in (1, 2))
        states = prefix, prefix_lse, suffix, suffix_lse
        out = lse_merge(*states, return_lse=False, variant=variant)
        np.testing.assert_array_equal(out, lse_merge(*states, variant=variant)[0])

    @settings(max_examples=5, deadline=None, database=None, derandomize=True)
    @given(
        tokens=st.integers(0, 6),
        dims=st.sampled_from([(3, 16), (5, 18)]),
        base=st.sampled_from(["e", "2"]),
        seed=st.integers(0, 99),
    )
    def test_any_number_of_tokens(self, variant, tokens, dims, base, seed):
        (prefix, prefix_lse), (suffix, suffix_lse) = (
            state((tokens, *dims), bfloat16, seed + side) for side in range(2)
        )
        out, lse = lse_merge(prefix, prefix_lse, suffix, suffix_lse, lse_base=base, variant=variant)
        log_add, power = (np.logaddexp, np.exp) if base == "e" else (np.logaddexp2, np.exp2)
        expected_lse = log_add(prefix_lse.astype(np.float64), suffix_lse)
        left, right = (power(each - expected_lse).T[..., None] for each in (prefix_lse, suffix_lse))
        expected = left * prefix.astype(np.float64) + right * suffix.astype(np.float64)
        np.testing.assert_allclose(out.astype(np.float64), expected, rtol=2**-8, atol=1e-5)
        np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=1e-6)


@stacked
class TestStacked:
    @pytest.mark.parametrize("count", [1, 2, 5, 33])
    def test_is_one_softmax_over_all_keys(self, variant, count):
        rng = np.random.default_rng(count)
        logits = rng.standard_normal((2, 3, 2 * count)) * 3
        values = rng.standard_normal((2, 3, 2 * count, 40))
        expected, expected_lse = attention(logits, values)
        chunks = [
            attention(logits[..., 2 * k : 2 * k + 2], values[:, :, 2 * k : 2 * k + 2])
            for k in range(count)
        ]
        partials, lses = (np.stack(each) for each in zip(*chunks))
        out, lse = lse_merge_k(partials, lses, variant=variant)
        np.testing.assert_allclose(out, expected, atol=2e-6)
        np.testing.assert_allclose(lse, expected_lse, atol=2e-6)

    def test_pairwise_in_any_order_is_the_same(self, variant):
        partials, lses = (
            np.stack(each) for each in zip(*(state((4, 3, 40), seed=s) for s in range(3)))
        )
        out, lse = lse_merge_k(partials, lses, variant=variant)
        for first, second, third in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
            both = lse_merge(partials[first], lses[first], partials[second], lses[second])
            pairwise, pairwise_lse = lse_merge(*both, partials[third], lses[third])
            np.testing.assert_allclose(out, pairwise, atol=1e-6)
            np.testing.assert_allclose(lse, pairwise_lse, atol=1e-6)

    @pytest.mark.parametrize("dtype", [np.float32, bfloat16])
    @pytest.mark.parametrize("place", [0, 3])
    def test_a_single_state_comes_back_bit_for_bit(self, variant, dtype, place):
        values = np.array(EXTREMES * 5, np.float32).astype(dtype).reshape(1, 1, 40)
        partials = np.full((5, 1, 1, 40), np.nan, dtype)
        lses = np.array([INF, -INF, INF, -INF, -INF], np.float32).reshape(5, 1, 1)
        partials[place], lses[place] = values, -1234.5
        out, lse = lse_merge_k(partials, lses, variant=variant)
        np.testing.assert_array_equal(bits(out), bits(values))
        assert lse[0, 0] == -1234.5

    def test_no_state_gives_exactly_zero(self, variant):
        partials = np.full((3, 1, 2, 40), np.nan, np.float32)
        lses = np.array([INF, -INF, -INF], np.float32).repeat(2).reshape(3, 2, 1)
        out, lse = lse_merge_k(partials, lses, out_dtype="bfloat16", variant=variant)
        assert out.dtype == bfloat16
        assert not bits(out).any()
        assert (lse == -np.inf).all()

    @pytest.mark.parametrize("others", [0.0, -np.inf])
    def test_nan_lse_is_never_taken_for_empty(self, variant, others):
        partials = np.ones((4, 2, 1, 40), np.float32)
        lses = np.full((4, 1, 2), others, np.float32)
        lses[2, 0, 1] = np.nan
        lses[0, 0, 0] = 0.5
        out, lse = lse_merge_k(partials, lses, variant=variant)
        assert np.isnan(out[1]).all()
        assert np.isnan(lse[0, 1])
        np.testing.assert_allclose(out[0], 1.0, rtol=1e-6)
        assert np.isfinite(lse[0, 0])

    def test_lse_in_the_last_column_of_the_partials(self, variant):
        """A split decode that keeps `[T, N, K, V + 1]`: rows of odd length, LSEs far apart."""
        buffer = state((2, 3, 4 * 41))[0].reshape(2, 3, 4, 41)
        partials = buffer[..., :40].transpose(2, 0, 1, 3)
        lses = buffer[..., 40].transpose(2, 0, 1)
        out, lse = lse_merge_k(partials, lses, lse_layout="TN", variant=variant)
        expected = lse_merge_k(partials.copy(), lses.copy(), lse_layout="TN", variant="reference")
        np.testing.assert_allclose(out, expected[0], atol=1e-6)
        np.testing.assert_allclose(lse, expected[1], atol=1e-6)

    @pytest.mark.parametrize("shape", [(3, 0, 3, 40), (3, 4, 0, 40)])
    def test_no_rows(self, variant, shape):
        lses = np.zeros((3, shape[2], shape[1]), np.float32)
        out, lse = lse_merge_k(np.zeros(shape, np.float32), lses, variant=variant)
        assert out.shape == shape[1:]
        assert lse.shape == lses.shape[1:]


def test_torch_tensors_in_place():
    torch = pytest.importorskip("torch")
    (prefix, prefix_lse), (suffix, suffix_lse) = (state((4, 3, 16), seed=s) for s in (1, 2))
    tensors = [torch.from_numpy(each) for each in (prefix, prefix_lse, suffix, suffix_lse)]
    tensors[0::2] = [tensor.bfloat16() for tensor in tensors[0::2]]
    expected, _ = lse_merge(*tensors)
    out = lse_merge(*tensors, out=tensors[0], return_lse=False)
    assert out is tensors[0]
    assert torch.equal(out, expected)


def test_oracle_is_the_formula():
    (prefix, prefix_lse), (suffix, suffix_lse) = (state((4, 3, 16), seed=s) for s in (1, 2))
    conventions = {"out": None, "out_lse": None, "return_lse": True, "lse_layout": "NT"}
    conventions |= {"output_scale": None, "context_tokens": 4}
    final = reference.lse_merge(prefix, prefix_lse, suffix, suffix_lse, lse_base="2", **conventions)
    weights = np.exp2(prefix_lse.astype(np.float64)), np.exp2(suffix_lse.astype(np.float64))
    left, right = (weight.T[..., None] for weight in weights)
    expected = (left * prefix + right * suffix) / (left + right)
    np.testing.assert_allclose(final["out"], expected, rtol=1e-13)
    np.testing.assert_allclose(final["out_lse"], np.log2(sum(weights)), rtol=1e-13)
