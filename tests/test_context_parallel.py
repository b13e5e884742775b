"""Ranks' shares of contexts against brute force, and gathered shards made whole."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox.planner import PAD_SLOT, ContextParallel, plan_context_chunks, slot_mapping

quick = settings(max_examples=120, deadline=None, database=None, derandomize=True)
worlds = st.builds(
    ContextParallel, st.integers(1, 5), st.integers(1, 6), st.sampled_from([1, 2, 3, 4, 16])
)


@quick
@given(ranks=worlds, lens=st.lists(st.integers(0, 200), min_size=1, max_size=4))
def test_shares_sum_to_the_whole_and_match_brute_force(ranks, lens):
    everyone = ranks.all_local_lens(lens)
    assert (everyone.sum(axis=-1) == lens).all()
    for request, length in enumerate(lens):
        held = [[] for _ in range(ranks.world_size)]
        for token in range(length):
            held[token // ranks.interleave % ranks.world_size].append(token)
        for rank, tokens in enumerate(held):
            assert ranks.local_lens(lens, rank)[request] == len(tokens) == everyone[request, rank]
            assert (ranks.owner(tokens) == rank).all()
            np.testing.assert_array_equal(ranks.local_positions(tokens), np.arange(len(tokens)))
    np.testing.assert_array_equal(ranks.empty_shards(lens), everyone == 0)


@quick
@given(ranks=worlds, length=st.integers(1, 120), seed=st.integers(0, 3))
def test_slots_of_all_ranks_hold_every_token_once(ranks, length, seed):
    columns = int(ranks.columns_needed(length))
    row = np.random.default_rng(seed).permutation(columns).astype(np.int32)[None]
    positions, requests = np.arange(length), np.zeros(length, np.int32)
    slots = [
        ranks.slot_mapping(row, requests, positions, rank, num_blocks=columns)
        for rank in range(ranks.world_size)
    ]
    owners = np.stack(slots) != PAD_SLOT
    assert (owners.sum(axis=0) == 1).all()
    for rank, mine in enumerate(slots):
        kept = mine[mine != PAD_SLOT]
        assert len(np.unique(kept)) == len(kept)
        local = np.arange(len(kept))
        np.testing.assert_array_equal(
            kept, slot_mapping(row, np.zeros_like(local), local, ranks.block_size)
        )
        assert len(kept) == ranks.local_lens(length, rank)


def test_one_rank_is_no_parallelism():
    ranks = ContextParallel(1, 3, 4)
    assert ranks.local_lens([5, 0], 0).tolist() == [5, 0]
    assert ranks.padding.needed(5) == 12
    assert ranks.all_local_lens([5, 0]).shape == (2, 1)


def gathered_rows(ranks, starts, lens):
    """What ranks gather and an all-gather makes of it: rows say (request, position) or -1."""
    shards = []
    for rank in range(ranks.world_size):
        rows = []
        for request, (start, length) in enumerate(zip(starts, lens)):
            mine = [p for p in range(start, start + length) if ranks.owner(p) == rank]
            first = int(ranks.local_starts(start))
            assert [int(ranks.local_positions(p)) for p in mine] == list(
                range(first, first + len(mine))
            )
            padding = int(ranks.padding.needed(length)) - len(mine)
            assert padding >= 0
            rows += [(request, p) for p in mine] + [(-1, -1)] * padding
        shards += rows
    return np.array(shards).reshape(-1, 2)


@quick
@given(
    ranks=worlds,
    lens=st.lists(st.integers(0, 90), min_size=1, max_size=4),
    begins=st.lists(st.integers(0, 2), min_size=4, max_size=4),
    order=st.sampled_from(["token", "rank"]),
)
def test_gathered_shards_become_whole(ranks, lens, begins, order):
    starts = np.array(begins[: len(lens)]) * ranks.alignment
    rows = gathered_rows(ranks, starts, lens)
    taken = rows[ranks.reorganise(starts, lens, order=order)]
    expected = [
        (request, start + p)
        for request, (start, length) in enumerate(zip(starts, lens))
        for p in sorted(range(length), key=lambda p: (ranks.owner(p), p) if order == "rank" else p)
    ]
    np.testing.assert_array_equal(taken, np.array(expected, int).reshape(-1, 2))


@pytest.mark.parametrize("kind", [np.uint8, np.uint32, np.uint64, np.int16])
def test_lengths_of_any_integer_type(kind):
    ranks = ContextParallel(4, 1, 64)
    assert ranks.all_local_lens(np.array([5, 1], kind)).tolist() == [[2, 1, 1, 1], [1, 0, 0, 0]]
    assert ranks.empty_shards(np.array([1], kind)).tolist() == [[False, True, True, True]]
    with pytest.raises(TypeError, match="lens"):
        ranks.local_lens([1.5], 0)
    with pytest.raises(ValueError, match="lens"):
        ranks.local_lens([-5], 0)


def test_columns_hold_the_padded_rows_of_a_chunk():
    ranks = ContextParallel(2, 3, 4)
    plan = plan_context_chunks([1], [4], 12, alignment=ranks.alignment, padding=ranks.padding)
    rows = int(plan.chunk_rows[0])
    assert ranks.columns_needed([1]).tolist() == [rows // 4] == [3]


def test_slots_take_lists_and_name_the_token_that_has_none():
    ranks = ContextParallel(2, 1, 4)
    row = np.array([[7]], np.int32)
    assert ranks.slot_mapping(row, [0, 0], [6, 7], 1).tolist() == [PAD_SLOT, 31]
    with pytest.raises(ValueError, match="token 1 of request 0 has position 9"):
        ranks.slot_mapping(row, [0, 0], [6, 9], 1)
    with pytest.raises(ValueError, match="requests"):
        ranks.slot_mapping(row, [0], [6, 7], 1)


def test_chunks_of_ranks_are_split_where_all_have_whole_blocks():
    ranks = ContextParallel(4, 3, 16)
    assert ranks.alignment == 192
    plan = plan_context_chunks(
        [1000, 10, 500],
        [2, 2, 2],
        100,
        alignment=ranks.alignment,
        padding=ranks.padding,
    )
    assert (plan.pieces.start % ranks.alignment == 0).all()
    assert (plan.chunk_rows <= 100).all()
    ranks.local_starts(plan.pieces.start)
    with pytest.raises(ValueError, match="starts"):
        ranks.local_starts([64])


@pytest.mark.parametrize("bad", [{"world_size": 0}, {"interleave": 0}, {"block_size": -1}])
def test_refusals(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        ContextParallel(**{"world_size": 2, **bad})
    ranks = ContextParallel(2)
    with pytest.raises(ValueError, match="rank"):
        ranks.local_lens([3], 2)
    with pytest.raises(ValueError, match="starts"):
        ranks.reorganise([0, 0], [3])
    with pytest.raises(ValueError, match="order"):
        ranks.reorganise([0], [3], order="any")
