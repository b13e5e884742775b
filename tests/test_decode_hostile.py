"""Caches and tables full of garbage where no query looks, and of NaN where one does."""

import numpy as np
import pytest
from attention_problems import (
    SCALE,
    TINY,
    attention,
    close,
    decode,
    decode_expected,
    decode_problem,
    fast_decode,
    ints,
    nothing_seen,
    only,
    paged,
    poisoned,
    rows_of,
    same,
    slots_of,
    with_indices,
)

from sandbox.kernels.case import GARBAGE_BLOCK
from sandbox.kernels.conformance import bits_of

L, E = TINY.L, TINY.E


@decode
def test_padding_requests(attend):
    """No keys, block ids -1, results that held NaN: exactly 0 and -inf."""
    problem = decode_problem([3, 0, 0, 0], attend.dtype)
    problem["block_table"][1:] = -1
    shape = (4, 1, TINY.N, L)
    given = {"out": poisoned(shape, attend.dtype), "out_lse": poisoned((TINY.N, 4))}
    alone = attend(**only(problem, [0]))
    attend(**problem, **given)
    close(given["out"][0], alone[0][0], attend.dtype)
    close(given["out_lse"][:, :1], alone[1])
    nothing_seen(given["out"][1:], given["out_lse"][:, 1:])


@decode
def test_what_no_query_sees_never_matters(attend):
    """Free pages, rows past the length and left of the window, table columns past the end."""
    problem = decode_problem([7, 2], attend.dtype, tokens=2) | {"window": 3}
    want = attend(**problem)
    seen = np.zeros(problem["cache"].shape[:2], bool)
    for request, first in ((0, 3), (1, 0)):
        slots = slots_of(problem, request)[first:]
        seen[slots // 4, slots % 4] = True
    for garbage in (np.nan, np.inf, 7.0):
        problem["cache"][~seen] = garbage
        table = problem["block_table"]
        for ids in (-1, GARBAGE_BLOCK, 0, -(2**31)):
            table[0, 2:] = table[1, 1:] = ids
        for got, other in zip(attend(**problem), want):
            same(got, other)


@decode
@pytest.mark.parametrize("garbage", [-1, -(2**31), 4, GARBAGE_BLOCK, 2**31 - 1])
def test_id_of_no_block_holds_no_key(attend, garbage):
    problem = decode_problem([10, 3], attend.dtype, spare=1)
    problem["cache"] = problem["cache"][:4]
    problem["block_table"] = ints([3, garbage, 0], [garbage, 1, 1])
    problem["cache"][3], problem["cache"][0] = (
        np.random.default_rng(seed).standard_normal((4, E)) for seed in (1, 2)
    )
    slots = ints(*range(12, 16), 0, 1)
    rows = problem["cache"].reshape(-1, E)[slots].astype(np.float64)
    out, lse, mass = attend(**problem, check_values=False, return_key_mass=True)
    scores = SCALE * problem["q"][0, 0].astype(np.float64) @ rows.T
    want, want_lse = attention(scores, rows[:, :L])
    close(out[0, 0], want, attend.dtype)
    close(lse[:, 0], want_lse)
    nothing_seen(out[1], lse[:, 1])
    assert not bits_of(mass[0, 0, 4:8]).any()
    assert not bits_of(mass[1]).any()
    close(mass[0, 0, :10].sum(), TINY.N, attend.dtype)


@fast_decode
def test_holes_of_many_blocks(attend):
    """Blocks that are not there at the start, in the middle and at the end of many tiles."""
    problem = decode_problem([600, 300], attend.dtype, tokens=2)
    table = problem["block_table"]
    gone = np.random.default_rng(2).random(table.shape) < 0.5
    gone[0, 20:60] = gone[1, :40] = True
    lens = problem["seq_lens"]
    want = decode_expected(problem, lambda b, i, j: not gone[b, j // 4] and j <= lens[b] - 2 + i)
    holey = problem | {"block_table": np.where(gone, np.int32(-1), table)}
    for splits in (None, 4):
        for got, other in zip(attend(**holey, num_splits=splits), want):
            close(got, other, attend.dtype)


@decode
def test_table_too_narrow_holds_no_more_keys(attend):
    problem = decode_problem([10], attend.dtype)
    narrow = problem | {"block_table": problem["block_table"][:, :1]}
    found = attend(**narrow, check_values=False)
    for got, want in zip(found, attend(**problem | {"seq_lens": ints(4)})):
        close(got, want, attend.dtype)


@fast_decode
def test_order_of_pages(attend):
    problem = decode_problem([30, 0, 17], attend.dtype, tokens=2)
    rows = [rows_of(problem, request) for request in range(3)]
    want = attend(**problem)
    for seed in (1, 2):
        for got, other in zip(attend(**problem | paged(rows, 4, seed=seed)), want):
            same(got, other)


@fast_decode
def test_pages_that_requests_share(attend):
    problem = decode_problem([13, 8], attend.dtype)
    problem["block_table"][1, :2] = problem["block_table"][0, :2]
    for got, want in zip(attend(**problem), decode_expected(problem, lambda b, i, j: True)):
        close(got, want, attend.dtype)


@fast_decode
@pytest.mark.parametrize("name", ["q", "cache"])
def test_nan_stays_in_its_request(attend, name):
    problem = decode_problem([40, 70, 150], attend.dtype, tokens=2)
    want = attend(**problem, lse_layout="BNS")
    if name == "q":
        problem["q"][1, 0, 1] = np.nan
    else:
        slot = slots_of(problem, 1)[33]
        problem["cache"][slot // 4, slot % 4] = np.nan
    found = attend(**problem, lse_layout="BNS")
    for got, other in zip(found, want):
        same(got[[0, 2]], other[[0, 2]])
        assert np.isnan(got[1]).any()


@fast_decode
@pytest.mark.parametrize("block_size", [1, 3, 16, 64, 100])
@pytest.mark.parametrize("sparse", [False, True])
def test_any_block_size(attend, block_size, sparse):
    lens = [130, 0, 64, 1]
    problem = decode_problem(lens, attend.dtype, block_size=block_size, seed=block_size)
    want = decode_expected(problem, lambda b, i, j: True)
    if sparse:
        chosen = np.full((4, 1, 131), -1)
        for request, length in enumerate(lens):
            chosen[request, 0, 131 - length :] = slots_of(problem, request)
        problem = with_indices(problem, chosen)
    for got, other in zip(attend(**problem), want):
        close(got, other, attend.dtype)
