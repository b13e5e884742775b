"""Decode attention of any number of heads, keys, requests and queries, none among them."""

import numpy as np
import pytest
from attention_problems import (
    NO_BLOCKS,
    TINY,
    close,
    decode,
    decode_expected,
    decode_problem,
    decode_reference,
    fast_decode,
    ints,
    nothing_seen,
    only,
)
from hypothesis import given, settings
from hypothesis import strategies as st

L = TINY.L


@fast_decode
@pytest.mark.parametrize("heads", [1, 3, 9, 63, 64, 65, 126])
def test_any_number_of_heads(attend, heads):
    problem = decode_problem([70, 3], attend.dtype, heads=heads, seed=heads)
    for got, want in zip(attend(**problem), decode_expected(problem, lambda b, i, j: True)):
        close(got, want, attend.dtype)


@fast_decode
@pytest.mark.parametrize(
    "lens", [[1], [31, 32, 33], [63, 64, 65, 1, 2], [127, 128, 129], [0, 257, 0, 0, 5], [0, 0]],
    ids=str,
)  # fmt: skip
def test_lengths_around_every_tile(attend, lens):
    problem = decode_problem(lens, attend.dtype, seed=len(lens))
    want = decode_expected(problem, lambda b, i, j: True)
    for splits in (None, 3):
        for got, other in zip(attend(**problem, num_splits=splits), want):
            close(got, other, attend.dtype)


@fast_decode
def test_more_requests_than_blocks_of_threads(attend):
    lens = [37 * i % 23 for i in range(300)]
    problem = decode_problem(lens, attend.dtype)
    for got, want in zip(attend(**problem), decode_expected(problem, lambda b, i, j: True)):
        close(got, want, attend.dtype)


@decode
@pytest.mark.parametrize(("requests", "tokens"), [(0, 1), (2, 0), (0, 0)])
def test_no_queries(attend, requests, tokens):
    problem = decode_problem([2, 3], attend.dtype, tokens=tokens)
    problem = only(problem, range(requests)) | {"return_key_mass": True}
    out, lse, mass = attend(**problem, lse_layout="BNS")
    assert out.shape == (requests, tokens, TINY.N, L)
    assert lse.shape == (requests, TINY.N, tokens)
    assert mass.shape == (requests, tokens, 12)


@decode
@pytest.mark.parametrize(
    "change",
    [
        {"block_table": np.zeros((2, 0), np.int32), "seq_lens": ints(0, 0)},
        {"block_table": np.zeros((2, 0), np.int32), "seq_lens": ints(3, 1)},
        {"block_table": ints([-1], [-1]), "seq_lens": ints(2, 0), "cache": None},
        {**NO_BLOCKS, "indices": np.zeros((2, 1, 0), np.int32)},
        {**NO_BLOCKS, "indices": np.full((2, 1, 3), -1, np.int32)},
        {**NO_BLOCKS, "indices": np.full((2, 1, 3), -1, np.int32), "cache": None},
    ],
    ids=["no table", "table too narrow", "no cache", "no entries", "holes", "holes, no cache"],
)
def test_no_keys(attend, change):
    problem = decode_problem([2, 3], attend.dtype)
    if "cache" in change:
        change = change | {"cache": problem["cache"][:0]}
    problem = problem | change | {"return_key_mass": True}
    out, lse, mass = attend(**problem, check_values=False)
    nothing_seen(out, lse)
    assert not mass.any()


@fast_decode
@settings(max_examples=12, deadline=None, database=None, derandomize=True)
@given(
    lens=st.lists(st.integers(0, 150), min_size=1, max_size=5),
    tokens=st.integers(1, 4),
    causal=st.booleans(),
    window=st.sampled_from([None, 1, 5, 70]),
    sunk=st.booleans(),
    splits=st.sampled_from([None, 1, 4]),
    longest=st.booleans(),
    seed=st.integers(0, 99),
)
def test_random_batches(attend, lens, tokens, causal, window, sunk, splits, longest, seed):
    problem = decode_problem(lens, attend.dtype, tokens=tokens, seed=seed)
    problem |= {"causal": causal, "window": window, "num_splits": splits}
    problem |= {"return_key_mass": True, "max_seq_len": max(lens) if longest else None}
    if sunk:
        problem["sink"] = np.random.default_rng(seed).standard_normal(TINY.N, np.float32)
    for got, want in zip(attend(**problem), decode_reference(**problem)):
        close(got, want, attend.dtype, TINY.N)
