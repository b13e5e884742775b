"""Rows of nobody, empty requests, lengths around tiles, NaN, far rows, random batches."""

import numpy as np
import pytest
from attention_problems import (
    SCALE,
    attention,
    close,
    fast_prefill,
    nothing_seen,
    poisoned,
    prefill,
    prefill_problem,
    prefill_reference,
    same,
)
from hypothesis import given, settings
from hypothesis import strategies as st


@prefill
def test_rows_of_nobody_never_matter(attend):
    problem = prefill_problem([2, 1], [3, 1], attend.dtype)
    out, lse = attend(**problem)
    for name, before, after in (("q", 0, 3), ("k", 2, 1), ("v", 2, 1)):
        rows = [poisoned((n, *problem[name].shape[1:]), attend.dtype) for n in (before, after)]
        problem[name] = np.concatenate([rows[0], problem[name], rows[1]])
    problem["cu_seqlens_k"] = problem["cu_seqlens_k"] + np.int32(2)
    wide, wide_lse = attend(**problem)
    same(wide[:3], out)
    same(wide_lse[:, :3].copy(), lse)
    nothing_seen(wide[3:], wide_lse[:, 3:])


@prefill
def test_queries_before_the_first_key(attend):
    """More queries than keys: the first ones see nothing."""
    problem = prefill_problem([5, 3], [2, 0], attend.dtype)
    out, lse = attend(**problem)
    nothing_seen(out[[0, 1, 2, 5, 6, 7]], lse[:, [0, 1, 2, 5, 6, 7]])
    scores = SCALE * np.einsum(
        "qnd,knd->nqk", problem["q"][3:5].astype(np.float64), problem["k"].astype(np.float64)
    )
    for head in range(2):
        values = problem["v"][:, head].astype(np.float64)
        first, first_lse = attention(scores[head, :1, :1], values[:1])
        second, second_lse = attention(scores[head, 1:], values)
        close(out[3:5, head], np.concatenate([first, second]), attend.dtype)
        close(lse[head, 3:5], np.concatenate([first_lse, second_lse]))


@prefill
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("query_lens", "key_lens"),
    [([], []), ([0], [0]), ([0, 0], [3, 0]), ([2], [0]), ([0, 1, 0], [0, 0, 2])],
    ids=str,
)
def test_nothing_to_see(attend, causal, query_lens, key_lens):
    problem = prefill_problem(query_lens, key_lens, attend.dtype, seed=1)
    out, lse = attend(**problem, causal=causal)
    assert out.shape == (sum(query_lens), 2, 16)
    assert lse.shape == (2, sum(query_lens))
    nothing_seen(out, lse)


@fast_prefill
@pytest.mark.parametrize("causal", [True, False])
def test_lengths_around_every_tile(attend, causal):
    lens = [1, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129]
    problem = prefill_problem(lens, lens[::-1], attend.dtype, heads=1, seed=2)
    found, want = (each(**problem, causal=causal) for each in (attend, prefill_reference))
    close(found[0], want[0], attend.dtype)
    close(found[1], want[1])


@fast_prefill
def test_long_beside_short(attend):
    problem = prefill_problem([1, 257, 64, 63], [1, 257, 300, 63], attend.dtype, seed=3)
    for got, want in zip(attend(**problem), prefill_reference(**problem)):
        close(got, want, attend.dtype)


@fast_prefill
@pytest.mark.parametrize("heads", [1, 3, 9, 63, 64, 65, 126])
def test_any_number_of_heads(attend, heads):
    problem = prefill_problem([3, 2], [5, 2], attend.dtype, heads=heads, seed=heads)
    for got, want in zip(attend(**problem), prefill_reference(**problem)):
        close(got, want, attend.dtype)


@fast_prefill
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_nan_stays_in_its_request(attend, name):
    problem = prefill_problem([40, 33, 20], [40, 50, 70], attend.dtype)
    out, lse = attend(**problem)
    kind = "cu_seqlens_q" if name == "q" else "cu_seqlens_k"
    first, end = problem[kind][1:3]
    problem[name][(first + end) // 2] = np.nan
    hurt, hurt_lse = attend(**problem)
    others = np.r_[0:40, 73:93]
    same(hurt[others], out[others])
    same(hurt_lse[:, others], lse[:, others])
    assert np.isnan(hurt[40:73]).any()


@fast_prefill
def test_nan_query_harms_no_other(attend):
    problem = prefill_problem([70], [70], attend.dtype)
    out, lse = attend(**problem)
    problem["q"][21, 1] = np.nan
    hurt, hurt_lse = attend(**problem)
    assert np.isnan(hurt[21, 1]).all()
    assert np.isnan(hurt_lse[1, 21])
    hurt[21, 1], hurt_lse[1, 21] = out[21, 1], lse[1, 21]
    same(hurt, out)
    same(hurt_lse, lse)


@prefill
def test_offsets_of_more_than_32_bits(attend):
    """Two tokens 2^31 + 8 elements apart, in memory of which only the touched pages exist."""
    problem = prefill_problem([2], [2], attend.dtype, heads=1)
    expected, expected_lse = attend(**problem)
    item, stride = attend.dtype.itemsize, 2**31 + 8
    try:
        memory = np.empty(stride + 256, attend.dtype)
        far = {}
        for place, (name, width) in enumerate((("q", 32), ("k", 32), ("v", 16), ("out", 16))):
            offset, strides = 64 * place * item, (stride * item, width * item, item)
            far[name] = np.ndarray((2, 1, width), attend.dtype, memory, offset, strides)
            if name != "out":
                far[name][...] = problem[name]
        _, lse = attend(**problem | far)
    except MemoryError as failure:
        pytest.skip(f"no room for the views: {failure}")
    same(far["out"].copy(), expected)
    same(lse, expected_lse)


@fast_prefill
@settings(max_examples=12, deadline=None, database=None, derandomize=True)
@given(
    lens=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 80)), max_size=4),
    heads=st.integers(1, 4),
    causal=st.booleans(),
    seed=st.integers(0, 99),
)
def test_random_batches(attend, lens, heads, causal, seed):
    query_lens, key_lens = ([pair[i] for pair in lens] for i in range(2))
    problem = prefill_problem(query_lens, key_lens, attend.dtype, heads=heads, seed=seed)
    found, want = (each(**problem, causal=causal) for each in (attend, prefill_reference))
    close(found[0], want[0], attend.dtype)
    close(found[1], want[1])
