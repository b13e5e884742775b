"""Batches and context chunks: cases from the field, brute force, properties."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox.dims import PRESETS
from sandbox.planner import (
    PAD_SLOT,
    ContextParallel,
    DecodePlanner,
    RowPadding,
    decodes_first,
    plan_batch,
    plan_context_chunks,
    plan_step,
    report,
    single_token_rows,
    size_workspace,
    split_decodes_and_prefills,
    workspace_of,
)

V3 = PRESETS["deepseek_v3"]
quick = settings(max_examples=150, deadline=None, database=None, derandomize=True)


def split(lens, **options):
    found = split_decodes_and_prefills(lens, **options)
    return (
        found.num_decodes,
        found.num_prefills,
        found.num_decode_tokens,
        found.num_prefill_tokens,
    )


class TestSplit:
    @pytest.mark.parametrize(
        ("lens", "options", "expected"),
        [
            ([], {}, (0, 0, 0, 0)),
            ([1, 1, 1], {}, (3, 0, 3, 0)),
            ([5, 1], {}, (0, 2, 0, 6)),
            ([1, 1, 9], {}, (2, 1, 2, 9)),
            ([2, 1, 3, 4, 5, 6, 7, 8], {"decode_threshold": 4}, (4, 4, 10, 26)),
            ([2, 2, 1, 3, 2, 1, 2], {"decode_threshold": 3, "require_uniform": True}, (2, 5, 4, 9)),
            ([2, 1, 2, 4, 5], {"decode_threshold": 4, "require_uniform": True}, (1, 4, 2, 12)),
            ([2, 2, 2, 0], {"decode_threshold": 2, "require_uniform": True}, (4, 0, 8, 0)),
            ([2, 2, 0, 2], {"decode_threshold": 2, "require_uniform": True}, (2, 2, 4, 2)),
            ([0, 0], {"require_uniform": True}, (2, 0, 0, 0)),
            ([1, 1, 1], {"is_prefill": [False, True, False]}, (1, 2, 1, 2)),
            ([1, 1], {"is_prefill": [True, False]}, (0, 2, 0, 2)),
        ],
    )
    def test_boundary(self, lens, options, expected):
        assert split(lens, **options) == expected

    @quick
    @given(
        lens=st.lists(st.integers(0, 6), max_size=9),
        flags=st.lists(st.booleans(), min_size=9, max_size=9),
        threshold=st.integers(1, 4),
        uniform=st.booleans(),
    )
    def test_order_puts_decodes_first_and_can_be_undone(self, lens, flags, threshold, uniform):
        options = {"decode_threshold": threshold, "require_uniform": uniform}
        order = decodes_first(lens, is_prefill=flags[: len(lens)], **options)
        lens, flags = np.array(lens, int), np.array(flags[: len(lens)], bool)
        assert (order.order[order.inverse] == np.arange(len(lens))).all()
        found = split_decodes_and_prefills(
            lens[order.order], is_prefill=flags[order.order], **options
        )
        decodes = (lens <= threshold) & ~flags
        if not uniform:
            assert found.num_decodes == decodes.sum()
            for kind in (decodes, ~decodes):
                kept = order.order[kind[order.order]]
                assert (np.diff(kept) > 0).all()
        elif (decodes & (lens > 0)).any():
            counts = np.bincount(lens[decodes & (lens > 0)])
            assert found.num_decodes >= counts.max()
        starts = np.concatenate([[0], np.cumsum(lens)])
        tokens = np.concatenate([np.arange(starts[r], starts[r + 1]) for r in order.order] or [[]])
        np.testing.assert_array_equal(order.tokens(lens), tokens)

    @pytest.mark.parametrize(
        ("lens", "error"), [([1.5], TypeError), ([-1], ValueError), ([[1]], ValueError)]
    )
    def test_refusals(self, lens, error):
        with pytest.raises(error, match="query_lens"):
            split_decodes_and_prefills(lens)


def table(*rows):
    return np.array(rows, np.int32)


class TestBatch:
    def test_positions_slots_and_padding(self):
        batch = plan_batch(
            [1, 3],
            [5, 2],
            table([7, 3], [0, 9]),
            4,
            padded_requests=3,
            padded_tokens=6,
        )
        assert batch.positions.tolist() == [5, 2, 3, 4, 0, 0]
        assert batch.slot_mapping.tolist() == [13, 2, 3, 36, PAD_SLOT, PAD_SLOT]
        assert batch.query_start_loc.tolist() == [0, 1, 4, 4]
        assert batch.seq_lens.tolist() == [6, 5, 0]
        assert batch.context_lens.tolist() == [5, 2, 0]
        assert (batch.max_query_len, batch.max_seq_len, batch.max_context_len) == (3, 6, 5)
        assert batch.num_tokens == 4
        assert (batch.split.num_decodes, batch.split.num_prefills) == (1, 1)

    @pytest.mark.parametrize(
        ("context", "row", "options"),
        [(7, [1, 2], {}), (3, [1, -1], {}), (0, [8, 1], {"num_blocks": 8})],
    )
    def test_positions_beyond_the_table_never_get_a_slot(self, context, row, options):
        arguments = ([2], [context], table(row), 4)
        with pytest.raises(ValueError, match="block_table"):
            plan_batch(*arguments, **options)
        batch = plan_batch(*arguments, out_of_range="pad", **options)
        inside = [p < 8 and 0 <= row[p // 4] < 8 for p in (context, context + 1)]
        assert [slot != PAD_SLOT for slot in batch.slot_mapping] == inside

    def test_no_request_and_no_column(self):
        batch = plan_batch([], [], np.zeros((0, 0), np.int32), 4)
        assert batch.query_start_loc.tolist() == [0]
        assert batch.split.num_decodes == 0
        with pytest.raises(ValueError, match="block_table"):
            plan_batch([1], [0], np.zeros((1, 0), np.int32), 4)

    @pytest.mark.parametrize(
        "change",
        [
            {"context_lens": [1]},
            {"block_table": table([1])},
            {"block_size": 0},
            {"padded_requests": 1},
            {"padded_tokens": 1},
            {"out_of_range": "wrap"},
        ],
    )
    def test_refusals_name_the_argument(self, change):
        good = {
            "query_lens": [1, 1],
            "context_lens": [1, 1],
            "block_table": table([1], [2]),
            "block_size": 4,
        }
        with pytest.raises(ValueError, match=next(iter(change))):
            plan_batch(**{**good, **change})

    def test_more_tokens_than_offsets_can_hold(self):
        with pytest.raises(ValueError, match="int32"):
            plan_batch([2**31 - 1, 1], [0, 0], table([1], [2]), 8)

    def test_block_of_tokens_that_see_each_other(self):
        rows, lens = single_token_rows(table([1, 2], [3, 4]), np.array([6, 9]), [2, 1])
        assert rows.tolist() == [[1, 2], [1, 2], [3, 4]]
        assert lens.tolist() == [6, 6, 9]


class TestLimits:
    """Numbers that do not fit are refused, never wrapped."""

    @pytest.mark.parametrize(
        "lens", [[2**31], [2**32], np.array([2**63 + 5], np.uint64), np.array([-1])]
    )
    def test_lengths_beyond_int32(self, lens):
        with pytest.raises(ValueError, match="context_lens"):
            plan_batch([1], lens, table([0]), 2**30)
        with pytest.raises(ValueError, match="context_lens"):
            plan_context_chunks(lens, [1], 64)

    def test_sums_beyond_int32(self):
        with pytest.raises(ValueError, match="query_lens"):
            plan_batch([1], [2**31 - 1], table([0]), 2**30)

    @pytest.mark.parametrize("kind", [np.int64, np.float64, np.uint32])
    def test_block_tables_are_int32(self, kind):
        with pytest.raises(TypeError, match="block_table"):
            plan_batch([1], [3], np.array([[1]], kind), 4)

    def test_slots_of_large_ids(self):
        rows = table([40_000_000])
        assert plan_batch([1], [5], rows, 64).slot_mapping.tolist() == [2_560_000_005]
        packed = DecodePlanner(1, block_size=64).plan([5], rows)
        assert packed["slot_mapping"].tolist() == [2_560_000_005]

    @pytest.mark.parametrize("context", [[-1], [2**31 - 1], [1.5]])
    def test_decode_contexts(self, context):
        with pytest.raises((TypeError, ValueError), match="context_lens"):
            DecodePlanner(2, block_size=4).plan(context, table([1]))

    def test_padding_alignment_and_largest_part_fit_together(self):
        padding = RowPadding(256, 64)
        with pytest.raises(ValueError, match="alignment"):
            plan_context_chunks([2000], [4], 128, padding=padding)
        with pytest.raises(ValueError, match="max_chunk"):
            plan_context_chunks([100], [4], 64, max_chunk=8, alignment=16)
        for bad in ((0, 1), (1, 0), (-1, 1)):
            with pytest.raises(ValueError, match="RowPadding"):
                RowPadding(*bad)

    def test_no_workspace_is_one_chunk(self):
        assert len(plan_context_chunks([16, 500], [1, 1], None)) == 1
        assert len(plan_step([4], [16], table([0, 1]), 16, None).context) == 1


class TestStep:
    def test_one_order_for_decodes_and_strategy(self):
        rows = np.arange(5 * 40, dtype=np.int32).reshape(5, 40)
        plan = plan_step(
            [7, 1, 5, 1, 6],
            [0, 9, 100, 3, 90],
            rows,
            4,
            128,
            strategy="fewest_merges",
        )
        assert plan.order.order.tolist() == [1, 3, 2, 4, 0]
        assert plan.order.order[plan.order.inverse].tolist() == [0, 1, 2, 3, 4]
        assert plan.batch.split.num_decodes == 2
        assert plan.batch.context_lens.tolist() == [9, 3, 100, 90, 0]
        assert plan.batch.slot_mapping[0] == rows[1, 2] * 4 + 1
        assert plan.context.context_lens.tolist() == [100, 90, 0]

    def test_flagged_prefill_of_one_token_is_no_decode(self):
        plan = plan_step([1, 1], [4, 8], table([0, 1, 2], [3, 4, 5]), 4, 64, is_prefill=[1, 0])
        assert plan.order.order.tolist() == [1, 0]
        assert plan.batch.split.num_prefills == 1
        assert plan.context.context_lens.tolist() == [4]

    def test_one_buffer_carries_all_arrays(self):
        rng = np.random.default_rng(0)
        context = rng.integers(0, 300, 40) * (rng.random(40) < 0.8)
        query = rng.integers(1, 9, 40)
        rows = rng.integers(0, 999, (40, 80)).astype(np.int32)
        plan = plan_step(query, context, rows, 4, 256)
        packed = plan.packed()
        copied = packed.moved(np.copy)
        assert copied.buffer.dtype == np.int32
        np.testing.assert_array_equal(copied["positions"], plan.batch.positions)
        np.testing.assert_array_equal(copied["slot_mapping"], plan.batch.slot_mapping)
        np.testing.assert_array_equal(copied["query_start_loc"], plan.batch.query_start_loc)
        for number, chunk in enumerate(plan.context.chunks()):
            pieces, bounds = plan.chunk_slices(number)
            np.testing.assert_array_equal(copied["chunk_starts"][pieces], chunk.starts)
            np.testing.assert_array_equal(copied["chunk_cu_seq_lens"][bounds], chunk.cu_seq_lens)
            got = copied["chunk_query_start_loc"][bounds]
            np.testing.assert_array_equal(got, chunk.query_start_loc)
        np.testing.assert_array_equal(copied["block_table"], rows[plan.order.order])
        with pytest.raises(IndexError, match="99"):
            plan.chunk_slices(99)
        for place in packed.places.values():
            assert place.offset % 4 == 0
        again = plan.packed(np.zeros(len(packed.buffer) + 5, np.int32))
        np.testing.assert_array_equal(again["seq_lens"], plan.batch.seq_lens)
        with pytest.raises(ValueError, match="buffer"):
            plan.packed(np.zeros(len(packed.buffer) - 9, np.int32))

    def test_zero_length_requests_go_last_without_decodes_too(self):
        order = decodes_first([0, 5, 0], decode_threshold=1, require_uniform=True).order
        assert order.tolist() == [1, 0, 2]

    def test_a_rank_has_its_own_slots_and_starts(self):
        ranks = ContextParallel(2, 1, 4)
        rows = table([3, 1, 5, 2, 7, 0], [6, 4, 9, 8, 10, 11])
        plans = [
            plan_step([1, 3], [9, 20], rows, 4, 8, parallel=ranks, rank=rank) for rank in (0, 1)
        ]
        for rank, plan in enumerate(plans):
            positions = plan.batch.positions
            local = positions // 2
            row = rows[[0, 1, 1, 1], local // 4]
            expected = np.where(positions % 2 == rank, row * 4 + local % 4, PAD_SLOT)
            np.testing.assert_array_equal(plan.batch.slot_mapping, expected)
            assert plan.context.pieces.start.tolist() == [0, 16]
            assert plan.packed()["chunk_starts"].tolist() == [0, 8]
        with pytest.raises(ValueError, match="block_size"):
            plan_step([1], [9], rows, 8, 8, parallel=ranks)

    def test_report_over_ranks(self):
        ranks = ContextParallel(4, 1, 64)
        options = {"alignment": ranks.alignment, "padding": ranks.padding}
        plan = plan_context_chunks([1000], [4], 1024, **options)
        found = report(plan, V3)
        assert (found.context_rows, found.padding_rows) == (1000, 24)
        assert found.peak_bytes == workspace_of(1024, V3, parallel=ranks).total_bytes
        plan = plan_context_chunks([16384 + 768], [4], 4096, **options)
        assert report(plan, V3).slivers == 1
        with pytest.raises(ValueError, match="nope"):
            report(plan, V3, "nope")

    def test_report_of_a_plan_counted_by_hand(self):
        plan = plan_step([5, 2, 3, 1], [768, 512, 512, 7], np.zeros((4, 50), np.int32), 16, 1024)
        report = plan.report(V3, "fp8_ds_mla")
        assert (report.chunks, report.least_chunks) == (2, 2)
        assert (report.merges, report.merged_tokens) == (1, 2)
        assert (report.context_rows, report.padding_rows) == (1792, 0)
        assert report.gather_bytes == 1792 * 656
        pairs = 5 * 768 + 2 * 512 + 3 * 512
        assert report.context_flops == 2 * 128 * (192 + 128) * pairs
        assert report.new_flops == 2 * 128 * 320 * (15 + 3 + 6)
        assert report.peak_bytes == workspace_of(1024, V3).total_bytes


class TestWorkspace:
    def test_bytes_of_the_field(self):
        space = size_workspace(V3, max_model_len=131072, max_num_seqs=4, block_size=64)
        assert space.rows == 65536
        assert space.gather_bytes == 65536 * 576 * 2
        keys_and_values = 65536 * 128 * 320 * 2
        assert keys_and_values == 5_368_709_120
        assert space.key_bytes + space.projected_bytes // 2 == keys_and_values
        assert space.total_bytes == space.gather_bytes + space.up_projection_bytes

    def test_short_models_few_sequences_and_budgets(self):
        space = size_workspace(V3, max_model_len=100, max_num_seqs=2, block_size=64)
        assert space.rows == 832
        limited = size_workspace(
            V3, max_model_len=131072, max_num_seqs=4, block_size=64, memory_budget=10**9
        )
        assert limited.total_bytes <= 10**9 < workspace_of(limited.rows + 64, V3).total_bytes
        with pytest.raises(ValueError, match="memory_budget"):
            size_workspace(V3, max_model_len=9, max_num_seqs=4, block_size=64, memory_budget=10**6)
        ranks = ContextParallel(4, 16, 64)
        space = size_workspace(V3, max_model_len=100, max_num_seqs=2, block_size=64, parallel=ranks)
        assert space.rows % ranks.alignment == 0
        assert space.gather_bytes == (space.rows + space.rows // 4) * 576 * 2


class TestDecodePlanner:
    @quick
    @given(
        context=st.lists(st.integers(0, 30), max_size=6),
        query_len=st.integers(1, 3),
        columns=st.integers(0, 9),
        seed=st.integers(0, 3),
    )
    def test_as_plan_batch(self, context, query_len, columns, seed):
        rows = np.random.default_rng(seed).integers(-1, 12, (7, columns)).astype(np.int32)
        planner = DecodePlanner(8, query_len, block_size=4, num_blocks=11)
        planner.plan([29] * 7, rows)
        packed = planner.plan(np.array(context, np.int32), rows)
        expected = plan_batch(
            [query_len] * len(context),
            context,
            rows,
            4,
            num_blocks=11,
            decode_threshold=3,
            padded_requests=8,
            padded_tokens=8 * query_len,
            out_of_range="pad",
        )
        np.testing.assert_array_equal(packed["positions"], expected.positions)
        np.testing.assert_array_equal(packed["slot_mapping"], expected.slot_mapping)
        np.testing.assert_array_equal(packed["seq_lens"], expected.seq_lens)

    def test_same_memory_and_nothing_that_grows(self):
        small, large = (self._peak_of_steps(requests) for requests in (2048, 65536))
        assert large < small + 65536  # buffers of fixed size

    @staticmethod
    def _peak_of_steps(requests):
        planner = DecodePlanner(requests, 2, block_size=16)
        context = np.full(requests, 100, np.int32)
        rows = np.zeros((requests, 8), np.int32)
        address = planner.plan(context, rows).buffer.ctypes.data
        tracemalloc.start()
        for _ in range(5):
            packed = planner.plan(context, rows)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert packed.buffer.ctypes.data == address
        return peak

    def test_refusals(self):
        planner = DecodePlanner(2, block_size=4)
        with pytest.raises(ValueError, match="context_lens"):
            planner.plan([1, 2, 3], np.zeros((3, 1), np.int32))
        with pytest.raises(TypeError, match="block_table"):
            planner.plan([1], np.zeros((1, 1), np.int64))
        with pytest.raises(ValueError, match="block_size"):
            DecodePlanner(2, block_size=0)
