"""Bits of a request's results with `deterministic=True` are its own affair."""

import numpy as np
import pytest
from attention_problems import (
    NO_BLOCKS,
    decode,
    decode_problem,
    fast_decode,
    only,
    same,
    slots_of,
)

from sandbox.kernels.case import GARBAGE_BLOCK


def deterministic_problem(attend, lens, **options):
    return decode_problem(lens, attend.dtype, **options) | {
        "deterministic": True, "return_key_mass": True, "lse_layout": "BNS",
    }  # fmt: skip


def check(attend, problem, requests, want, **options):
    """The problem's requests have, one for one, the results `want` of those named."""
    out, lse, mass = attend(**problem, **options)
    same(out, want[0][requests])
    same(lse, want[1][requests])
    common = min(mass.shape[2], want[2].shape[2])
    same(mass[..., :common].copy(), want[2][requests, :, :common].copy())
    assert not mass[..., common:].any()


@fast_decode
@pytest.mark.parametrize("options", [{}, {"window": 1300}], ids=["all", "window"])
def test_alone_in_a_batch_and_in_any_order(attend, options):
    problem = deterministic_problem(attend, [2100, 5, 0, 1030, 1024], tokens=2) | options
    want = attend(**problem)
    for request in range(5):
        check(attend, only(problem, [request]), [request], want)
    check(attend, only(problem, [3, 0, 4, 2, 1]), [3, 0, 4, 2, 1], want)
    check(attend, only(problem, [1, 0, 0, 0]), [1, 0, 0, 0], want)


@decode
def test_alone_and_in_a_small_batch(attend):
    problem = deterministic_problem(attend, [6, 3])
    want = attend(**problem)
    for request in range(2):
        check(attend, only(problem, [request]), [request], want)


@fast_decode
@pytest.mark.parametrize("splits", [1, 2, 7])
def test_with_any_splits(attend, splits):
    problem = deterministic_problem(attend, [2100, 5, 0, 1030])
    check(attend, problem, range(4), attend(**problem), num_splits=splits)


@fast_decode
def test_with_wider_tables_and_a_longest_length(attend):
    problem = deterministic_problem(attend, [2100, 5, 0, 1030])
    want = attend(**problem)
    table = problem["block_table"]
    wide = np.full((4, table.shape[1] + 1500), GARBAGE_BLOCK, np.int32)
    wide[:, : table.shape[1]] = table
    narrow = np.ascontiguousarray(table[:, : -(-2100 // 4)])
    for each in (table, wide, narrow):
        for longest in (None, 2100, 2101, 5000, 10**9):
            some = problem | {"block_table": each, "max_seq_len": longest}
            check(attend, some, range(4), want)
    short = only(problem, [1, 2]) | {"max_seq_len": 5}
    check(attend, short, [1, 2], want)


@fast_decode
def test_of_named_keys(attend):
    problem = decode_problem([1500], attend.dtype, tokens=3)
    chosen = np.random.default_rng(1).choice(slots_of(problem, 0), (3, 1, 1300))
    chosen[1, 0, 200:] = -1
    queries = problem["q"].swapaxes(0, 1)
    problem |= NO_BLOCKS | {"deterministic": True, "lse_layout": "BNS"}
    chosen = chosen.astype(np.int32)
    want = attend(**problem | {"q": queries, "indices": chosen})
    for requests in ([0], [1], [2], [2, 0, 1]):
        some = {"q": queries[requests].copy(), "indices": chosen[requests]}
        for splits in (None, 3):
            for got, other in zip(attend(**problem | some, num_splits=splits), want):
                same(got, other[requests])
