"""Which keys a query sees: causal masks, trees of drafts and windows, against float64."""

import numpy as np
import pytest
from attention_problems import (
    close,
    decode,
    decode_expected,
    decode_problem,
    fast_decode,
    nothing_seen,
    same,
    tree_words,
)

MASKS = {
    "causal": {},
    "all": {"causal": False},
    "tree": {"tree": True},
    "window": {"window": 3},
    "window of all": {"window": 3, "causal": False},
    "window of a tree": {"window": 4, "tree": True},
}


def sees(problem, options, seen):
    lens, tokens = problem["seq_lens"].tolist(), problem["q"].shape[1]

    def answer(b, i, j):
        own, new = lens[b] - tokens + i, j - (lens[b] - tokens)
        if seen is not None:
            visible = new < 0 or seen[b, i, new]
        else:
            visible = j <= own or not options.get("causal", True)
        return visible and j > own - options.get("window", 10**9)

    return answer


def check(attend, problem, options):
    options = dict(options)
    seen = None
    if options.pop("tree", False):
        requests, tokens = problem["q"].shape[:2]
        seen = np.random.default_rng(5).random((requests, tokens, tokens)) < 0.4
        seen[0, 1] = False
        options["tree_mask"] = tree_words(seen)
    out, lse = attend(**problem, **options)
    want, want_lse = decode_expected(problem, sees(problem, options, seen))
    close(out, want, attend.dtype)
    close(lse, want_lse)
    unseen = want_lse == -np.inf
    nothing_seen(out.reshape(-1, *out.shape[2:]).swapaxes(0, 1)[unseen], lse[unseen])


@decode
@pytest.mark.parametrize("mask", MASKS)
def test_few_keys(attend, mask):
    """The last request is shorter than it has queries: the first ones see nothing."""
    problem = decode_problem([7, 2], attend.dtype, tokens=3, heads=1, seed=6)
    check(attend, problem, MASKS[mask])


@fast_decode
@pytest.mark.parametrize("mask", MASKS)
def test_more_keys_than_a_tile_and_more_tokens_than_a_word(attend, mask):
    problem = decode_problem([140, 40, 0, 35, 1], attend.dtype, tokens=40, seed=7)
    check(attend, problem, MASKS[mask])


@fast_decode
def test_bits_of_no_token_mean_nothing(attend):
    problem = decode_problem([9], attend.dtype, tokens=3)
    words = tree_words(np.tri(3, dtype=bool)[None])
    want = attend(**problem, tree_mask=words)
    for got, other in zip(attend(**problem, tree_mask=words | ~np.int32(7)), want):
        same(got, other)
