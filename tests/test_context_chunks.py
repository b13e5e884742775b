"""Context chunks: cases from the field, a packing by hand, properties of every strategy."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox.dims import PRESETS
from sandbox.planner import (
    STRATEGIES,
    RowPadding,
    plan_context_chunks,
)

V3 = PRESETS["deepseek_v3"]
quick = settings(max_examples=150, deadline=None, database=None, derandomize=True)


def chunks_of(budget, context, *, most=None, alignment=1, padding=None, strategy="in_order"):
    plan = plan_context_chunks(
        context,
        [4] * len(context),
        budget,
        max_chunk=most,
        alignment=alignment,
        padding=padding,
        strategy=strategy,
    )
    triples = zip(
        plan.pieces.request.tolist(), plan.pieces.start.tolist(), plan.pieces.length.tolist()
    )
    triples = list(triples)
    return [triples[a:b] for a, b in itertools.pairwise(plan.pieces.bounds.tolist())], plan


FIELD = [
    (1024, 1024, 16, [768, 512, 512], [[(0, 0, 768), (1, 0, 256)], [(1, 256, 256), (2, 0, 512)]]),
    (
        1024,
        1024,
        16,
        [2048, 32, 32],
        [[(0, 0, 1024)], [(0, 1024, 1024)], [(1, 0, 32), (2, 0, 32)]],
    ),
    (1024, 1024, 16, [64, 0, 64, 0], [[(0, 0, 64)], [(2, 0, 64)]]),
    (1024, 1024, 16, [0, 0], []),
    (
        1000,
        992,
        16,
        [100, 37, 5000, 0, 3],
        [
            [(0, 0, 100), (1, 0, 37), (2, 0, 848)],
            [(2, 848, 992)],
            [(2, 1840, 992)],
            [(2, 2832, 992)],
            [(2, 3824, 992)],
            [(2, 4816, 184)],
            [(4, 0, 3)],
        ],
    ),
    (1024, 1024, 16, [1025], [[(0, 0, 1024)], [(0, 1024, 1)]]),
    (1024, 1024, 16, [1024, 1024], [[(0, 0, 1024)], [(1, 0, 1024)]]),
    (1024, 1024, 16, [1000, 100], [[(0, 0, 1000), (1, 0, 16)], [(1, 16, 84)]]),
    (1024, 1024, 16, [1015, 100], [[(0, 0, 1015)], [(1, 0, 100)]]),
    (65536, None, 16, [60000] + [16] * 31, [[(0, 0, 60000)] + [(r, 0, 16) for r in range(1, 32)]]),
]


class TestChunks:
    @pytest.mark.parametrize(("budget", "most", "alignment", "context", "expected"), FIELD)
    def test_field_cases(self, budget, most, alignment, context, expected):
        assert chunks_of(budget, context, most=most, alignment=alignment)[0] == expected

    def test_padded_rows_of_ranks(self):
        padding = RowPadding(64, 16)
        found, _ = chunks_of(16, [100], most=64, alignment=64, padding=padding)
        assert found == [[(0, 0, 64)], [(0, 64, 36)]]
        found, plan = chunks_of(32, [65, 96], alignment=64, padding=padding)
        assert found == [[(0, 0, 65)], [(1, 0, 96)]]
        assert plan.chunk_rows.tolist() == [32, 32]

    def test_tokens_without_context_and_the_layout_of_chunks(self):
        plan = plan_context_chunks([64, 0, 64, 0], [4] * 4, 1024, alignment=16)
        assert plan.empty_token_slices == [slice(4, 8), slice(12, 16)]
        first, second = plan.chunks()
        assert (first.requests, first.tokens) == (slice(0, 1), slice(0, 4))
        assert (second.requests, second.tokens) == (slice(2, 3), slice(8, 12))
        plan = plan_context_chunks([768, 512, 512], [5, 2, 3], 1024, alignment=16)
        first, second = plan.chunks()
        assert not first.is_continuation
        assert first.merged_tokens == 0
        assert second.is_continuation
        assert (second.requests, second.tokens) == (slice(1, 3), slice(5, 10))
        assert second.continuation_token_end == 7
        assert second.merged_tokens == 2
        assert second.starts.tolist() == [256, 0]
        assert second.cu_seq_lens.tolist() == [0, 256, 768]
        assert second.query_start_loc.tolist() == [0, 2, 5]
        assert (second.max_query_len, second.max_context_len) == (3, 512)
        assert second.num_context_tokens == 768

    def test_no_context_is_an_empty_plan_and_any_context_is_planned(self):
        assert not plan_context_chunks([0, 0, 0], [1, 2, 3], 16)
        plan = plan_context_chunks([16], [3], 16)
        assert plan
        assert len(plan) == 1
        assert not plan.needs_merge

    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_too_small_a_workspace_is_an_error_that_says_so(self, strategy):
        with pytest.raises(ValueError, match="workspace of 8 rows is too small"):
            chunks_of(8, [100], alignment=16, strategy=strategy)
        assert chunks_of(8, [8], alignment=16, strategy=strategy)[0] == [[(0, 0, 8)]]

    def test_many_requests_in_a_small_workspace(self):
        found, _ = chunks_of(64, [16] * 5, alignment=16)
        assert found == [[(r, 0, 16) for r in range(4)], [(4, 0, 16)]]

    @pytest.mark.parametrize(
        "change",
        [
            {"query_lens": [1]},
            {"row_budget": 0},
            {"alignment": 0},
            {"strategy": "best"},
            {"context_lens": [-1, 2]},
        ],
    )
    def test_refusals_name_the_argument(self, change):
        good = {"context_lens": [3, 2], "query_lens": [1, 1], "row_budget": 16}
        with pytest.raises(ValueError, match=next(iter(change))):
            plan_context_chunks(**{**good, **change})


def packing_by_hand(context, budget, most, alignment, padding):
    """Request-aware packing, a request at a time."""
    chunks, current, used = [], [], 0

    def close():
        nonlocal current, used
        if current:
            chunks.append(current)
        current, used = [], 0

    for request, length in enumerate(context):
        if length == 0:
            close()
            continue
        start = 0
        while start < length:
            left = length - start
            if used + padding.needed(left) <= budget:
                current.append((request, start, left))
                used += padding.needed(left)
                break
            cut = 0
            for size in range(alignment, left, alignment):
                if size <= most and used + padding.needed(size) <= budget:
                    cut = size
            if cut:
                current.append((request, start, cut))
                start += cut
            elif not current:
                raise ValueError("too small")
            close()
    close()
    return chunks


paddings = st.sampled_from([RowPadding(), RowPadding(8, 2), RowPadding(12, 4)])


class TestProperties:
    @quick
    @given(
        context=st.lists(st.one_of(st.just(0), st.integers(0, 90)), max_size=12),
        budget=st.integers(1, 70),
        multiple=st.integers(1, 3),
        padding=paddings,
    )
    def test_in_order_is_the_packing_by_hand(self, context, budget, multiple, padding):
        alignment = multiple * padding.tokens
        most = max(padding.held(budget), 1)
        try:
            expected = packing_by_hand(context, budget, most, alignment, padding)
        except ValueError:
            with pytest.raises(ValueError, match="too small"):
                chunks_of(budget, context, alignment=alignment, padding=padding)
            return
        found, _ = chunks_of(budget, context, alignment=alignment, padding=padding)
        assert found == expected

    @quick
    @given(
        context=st.lists(st.one_of(st.just(0), st.integers(0, 90)), max_size=12),
        budget=st.integers(16, 70),
        strategy=st.sampled_from(sorted(STRATEGIES)),
        padding=paddings,
        seed=st.integers(0, 5),
    )
    def test_every_strategy(self, context, budget, strategy, padding, seed):
        query = np.random.default_rng(seed).integers(1, 9, len(context))
        alignment = padding.tokens
        options = {"alignment": alignment, "padding": padding}
        plan = plan_context_chunks(context, query, budget, strategy=strategy, **options)
        assert sorted(plan.order.tolist()) == list(range(len(context)))
        np.testing.assert_array_equal(plan.context_lens, np.array(context, int)[plan.order])
        np.testing.assert_array_equal(plan.query_lens, query[plan.order])
        pieces = plan.pieces
        seen = dict.fromkeys(range(len(context)), 0)
        for request, start, length in zip(pieces.request, pieces.start, pieces.length):
            assert length > 0
            assert start == seen[request]
            assert start % alignment == 0
            seen[request] += length
        assert [seen[r] for r in range(len(context))] == plan.context_lens.tolist()
        assert (plan.chunk_rows <= budget).all()
        for chunk, (begin, end) in zip(plan.chunks(), itertools.pairwise(pieces.bounds)):
            assert (np.diff(pieces.request[begin:end]) == 1).all()
            assert (pieces.start[begin + 1 : end] == 0).all()
            assert chunk.is_continuation == (pieces.start[begin] > 0)
            assert (chunk.starts == pieces.start[begin:end]).all()
        covered = np.zeros(int(query.sum()), int)
        for place in plan.empty_token_slices:
            covered[place] += 1
        bounds = np.concatenate([[0], np.cumsum(plan.query_lens)])
        for request, length in enumerate(plan.context_lens):
            assert (covered[bounds[request] : bounds[request + 1]] == (length == 0)).all()
        default = plan_context_chunks(context, query, budget, **options)
        assert len(plan) <= len(default)
        if strategy == "fewest_merges" and len(plan) == len(default):
            assert plan.continues.sum() <= default.continues.sum()

    def test_small_grids_at_the_edges_of_the_workspace(self):
        sizes = (0, 1, 3, 4, 5, 7, 8, 9, 16, 17)
        for context in itertools.product(sizes, repeat=3):
            for budget in (4, 7, 8, 9):
                expected = packing_by_hand(context, budget, budget, 4, RowPadding())
                assert chunks_of(budget, list(context), alignment=4)[0] == expected
