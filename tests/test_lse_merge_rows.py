"""Which rows have a context, where rows lie, and what a NaN does to its row."""

import ctypes
import mmap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lse_merge_states import INF, NAN, bits, coded, pair, same, stacked, state, two_states
from variants_here import here

from sandbox.arrays import bfloat16
from sandbox.kernels.lse_merge import lse_merge, lse_merge_k


def options_of(variant):
    """What makes the variant run: raw_unfused makes codes only."""
    return {"variant": variant} | ({"output_scale": 0.05} if variant == "raw_unfused" else {})


def spoiled(prefix, prefix_lse, context):
    """The prefix as it is where nothing has written it beyond the first tokens."""
    prefix, prefix_lse = prefix.copy(), prefix_lse.copy()
    prefix[context:] = NAN
    rest = prefix_lse[:, context:]
    rest[...] = np.resize(np.float32([np.nan, 1e30, np.inf, -np.inf, 0]), rest.shape)
    return prefix, prefix_lse


@coded
class TestContextTokens:
    @pytest.mark.parametrize("context", [0, 1, 3, 5, np.int32(2), np.int64(5)])
    def test_the_rest_is_as_with_an_empty_prefix(self, variant, context):
        prefix, prefix_lse, suffix, suffix_lse = two_states((5, 2, 8), bfloat16)
        suffix_lse[:, 4] = INF, NAN
        suffix_lse[:, 2] = -INF
        empty_lse = prefix_lse.copy()
        empty_lse[:, context:] = -INF
        options = options_of(variant)
        expected = lse_merge(prefix, empty_lse, suffix, suffix_lse, **options)
        prefix, prefix_lse = spoiled(prefix, prefix_lse, context)
        out, lse = lse_merge(
            prefix, prefix_lse, suffix, suffix_lse, context_tokens=context, **options
        )
        same(out, expected[0])
        same(lse, expected[1])

    @settings(max_examples=4, deadline=None, database=None, derandomize=True)
    @given(data=st.data(), tokens=st.integers(0, 9), dims=st.sampled_from([(3, 8), (5, 18)]))
    def test_any_number(self, variant, data, tokens, dims):
        context = data.draw(st.integers(0, tokens))
        prefix, prefix_lse, suffix, suffix_lse = two_states((tokens, *dims), bfloat16)
        options = options_of(variant) | {"lse_base": "2"}
        first, rest = slice(0, context), slice(context, None)
        both = prefix[first], prefix_lse[:, first], suffix[first], suffix_lse[:, first]
        expected, expected_lse = lse_merge(*both, **options)
        lses = spoiled(prefix, prefix_lse, context)[1], suffix_lse
        out, lse = lse_merge(prefix, lses[0], suffix, lses[1], context_tokens=context, **options)
        np.testing.assert_array_equal(out[first], expected)
        np.testing.assert_array_equal(lse[:, first], expected_lse)
        np.testing.assert_array_equal(lse[:, rest], suffix_lse[:, rest])


@pair
class TestSuffixAlone:
    @pytest.mark.parametrize("layout", ["NT", "TN"])
    def test_rows_without_context_are_the_suffix(self, variant, layout):
        prefix, prefix_lse, suffix, suffix_lse = two_states((4, 2, 16), np.float16)
        prefix, prefix_lse = spoiled(prefix, prefix_lse, 1)
        suffix[1, 0, :2], suffix[1, 0, 2] = (-0.0, 2.0**-24), NAN
        suffix_lse[0, 2:] = INF, -INF
        lses = [lse if layout == "NT" else lse.T for lse in (prefix_lse, suffix_lse)]
        out, lse = lse_merge(
            *(prefix, lses[0], suffix, lses[1]),
            context_tokens=1,
            lse_layout=layout,
            variant=variant,
        )
        lse = lse if layout == "NT" else lse.T
        same(out[1], suffix[1])
        same(out[2:, 1], suffix[2:, 1])
        assert not bits(out[2:, 0]).any()
        assert (lse[0, 2:] == -np.inf).all()
        np.testing.assert_array_equal(lse[:, 1], suffix_lse[:, 1])
        np.testing.assert_array_equal(lse[1, 1:], suffix_lse[1, 1:])

    @pytest.mark.parametrize("context", [0, 2, 4])
    @pytest.mark.parametrize("side", ["prefix", "suffix"])
    def test_in_place(self, variant, context, side):
        prefix, prefix_lse, suffix, suffix_lse = two_states((4, 2, 16))
        prefix, prefix_lse = spoiled(prefix, prefix_lse, context)
        states = {"prefix": prefix, "prefix_lse": prefix_lse}
        states |= {"suffix": suffix, "suffix_lse": suffix_lse}
        expected = lse_merge(**states, context_tokens=context, variant=variant)
        out, lse = lse_merge(
            **states,
            out=states[side],
            out_lse=states[f"{side}_lse"],
            context_tokens=context,
            variant=variant,
        )
        assert out is states[side]
        np.testing.assert_array_equal(out, expected[0])
        np.testing.assert_array_equal(lse, expected[1])


UNTOUCHED = pytest.mark.parametrize("variant", here(lse_merge, but=["reference", "torch"]))


@UNTOUCHED
def test_prefix_is_not_read_where_there_is_no_context(variant):
    """Each token has pages of its own; those that nothing reads are never given memory."""
    page, tokens, context = mmap.PAGESIZE, 6, 2
    _, _, suffix, suffix_lse = two_states((tokens, 2, 16))
    views = {}
    for name, shape in (("prefix", (tokens, 2, 16)), ("prefix_lse", (tokens, 2))):
        memory = mmap.mmap(-1, tokens * page)
        inner = (64, 4) if name == "prefix" else (4,)
        views[name] = np.ndarray(shape, np.float32, memory, 0, (page, *inner))
        views[name][:context] = 1.0
    lse_merge(
        **views,
        suffix=suffix,
        suffix_lse=suffix_lse.T,
        lse_layout="TN",
        context_tokens=context,
        **options_of(variant),
    )
    for view in views.values():
        assert resident(view, tokens * page) == [True] * context + [False] * (tokens - context)


def resident(array, length):
    """For each page from the array's start on whether it has memory."""
    found = (ctypes.c_ubyte * (length // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p(array.ctypes.data)
    assert libc.mincore(address, ctypes.c_size_t(length), found) == 0, ctypes.get_errno()
    return [bool(each & 1) for each in found]


@pytest.mark.parametrize(
    ("context", "error"),
    [(-1, ValueError), (4, ValueError), (1.0, TypeError), (True, TypeError), ("1", TypeError)],
)
def test_refuses_what_is_no_number_of_tokens(context, error):
    with pytest.raises(error, match="context_tokens"):
        lse_merge(*two_states((3, 2, 16)), context_tokens=context)


@coded
@pytest.mark.parametrize("layout", ["NT", "TN"])
@pytest.mark.parametrize("context", [None, 3])
def test_padded_v_beside_packed_rows(variant, layout, context):
    """A prefix whose V of 16 was padded to 24 elements, a packed suffix, an out with rows of 40,
    and LSEs that are slices of longer ones."""
    shape, dtype = (5, 2, 16), bfloat16
    prefix, prefix_lse, suffix, suffix_lse = two_states(shape, dtype)
    options = options_of(variant) | {"context_tokens": context}
    expected = lse_merge(prefix, prefix_lse, suffix, suffix_lse, **options)
    padded = np.full((5, 2, 24), NAN, dtype)
    padded[..., :16] = prefix
    wide_out = np.full((5, 2, 40), 77, expected[0].dtype)
    lses, wide_lses = [], []
    for lse, before in ((prefix_lse, 1), (suffix_lse, 0), (np.full_like(prefix_lse, NAN), 3)):
        wide = np.full((3, 9) if layout == "NT" else (9, 3), NAN, np.float32)
        by_head = wide if layout == "NT" else wide.T
        view = by_head[1:3, before : before + 5]
        view[...] = lse
        lses.append(view if layout == "NT" else view.T)
        wide_lses.append(wide)
    out, lse = lse_merge(
        *(padded[..., :16], lses[0], suffix, lses[1]),
        out=wide_out[..., 8:24],
        out_lse=lses[2],
        lse_layout=layout,
        **options,
    )
    np.testing.assert_array_equal(out, expected[0])
    np.testing.assert_array_equal(lse if layout == "NT" else lse.T, expected[1])
    assert (wide_out[..., :8] == 77).all()
    assert (wide_out[..., 24:] == 77).all()
    assert np.isnan(wide_lses[2]).sum() == 27 - 10


@pair
class TestNan:
    @pytest.mark.parametrize("context", [None, 1])
    def test_of_an_lse_takes_its_row(self, variant, context):
        prefix, prefix_lse, suffix, suffix_lse = two_states((3, 2, 16))
        suffix_lse[0, 1], prefix_lse[1, 0] = NAN, NAN
        out, lse = lse_merge(
            prefix, prefix_lse, suffix, suffix_lse, context_tokens=context, variant=variant
        )
        assert np.argwhere(np.isnan(lse)).tolist() == [[0, 1], [1, 0]]
        assert np.isnan(out[1, 0]).all()
        assert np.isnan(out[0, 1]).all()
        assert np.isnan(out).sum() == 2 * 16

    @pytest.mark.parametrize("weight", [1e4, 0.0, -1e4])
    def test_of_a_value_counts_however_little_its_state_weighs(self, variant, weight):
        prefix, prefix_lse, suffix, suffix_lse = two_states((2, 2, 16), bfloat16)
        prefix[0, 1, 3] = suffix[1, 0, 5] = NAN
        prefix_lse[...], suffix_lse[...] = weight, -weight
        out, lse = lse_merge(prefix, prefix_lse, suffix, suffix_lse, variant=variant)
        where = np.argwhere(np.isnan(out.astype(np.float32))).tolist()
        assert where == [[0, 1, 3], [1, 0, 5]]
        assert np.isfinite(lse).all()


@stacked
def test_nan_value_of_any_state_counts_and_an_empty_state_does_not(variant):
    partials, lses = (
        np.stack(each) for each in zip(*(state((2, 2, 40), seed=s) for s in range(4)))
    )
    partials[1, 0, 1, 7], lses[1, 1, 0] = NAN, -1e4
    partials[2, 1, 0], lses[2, 0, 1] = NAN, INF
    out, lse = lse_merge_k(partials, lses, variant=variant)
    assert np.argwhere(np.isnan(out)).tolist() == [[0, 1, 7]]
    assert np.isfinite(lse).all()
