"""What is special to the inserts: field cases, refusals, identities, random batches."""

from dataclasses import replace

import numpy as np
import pytest
from concat_insert_problems import every_variant, problem, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox.arrays import bfloat16
from sandbox.dims import PRESETS
from sandbox.kernels import (
    Unavailable,
    concat_insert,
    concat_insert_decode,
    concat_insert_prefill,
    conformance,
)
from sandbox.kernels.case import Case, Workload
from sandbox.kernels.concat_insert import cases, reference
from sandbox.kernels.conformance import bits_of

OPS = (concat_insert, concat_insert_prefill, concat_insert_decode)


@every_variant(*OPS)
class TestSlots:
    def test_first_slot_is_ordinary_and_nan_stays_in_its_row(self, op, variant):
        arguments = problem(op)
        cache = arguments["cache"]
        cache[...] = 7
        arguments["slot_mapping"][:] = [0, 4, 9]
        arguments["kv_c"][0] = np.nan
        op(**arguments, variant=variant)
        rows = cache.reshape(-1, cache.shape[2])
        latent = arguments["kv_c"].shape[1]
        assert same_bits(rows[[0, 4, 9], :latent], arguments["kv_c"][:3])
        assert np.isfinite(rows[0, latent:]).all()
        assert (np.delete(rows, [0, 4, 9], axis=0) == 7).all()

    def test_negative_slots_write_nothing(self, op, variant):
        arguments = problem(op, bfloat16)
        before = arguments["cache"].copy()
        arguments["slot_mapping"][:] = [-1, -(2**40), -1]
        op(**arguments, variant=variant)
        assert same_bits(arguments["cache"], before)

    @pytest.mark.parametrize("beyond", [20, 2**31, 2**32, 2**62])
    def test_slots_beyond_the_cache_are_skipped_or_refused(self, op, variant, beyond):
        arguments = problem(op, bfloat16)
        pool = np.full((40, *arguments["cache"].shape[1:]), 3, bfloat16)
        arguments["cache"] = pool[10:15]
        arguments["slot_mapping"][:] = [beyond, 19, beyond + 1]
        before = pool.copy()
        with pytest.raises(ValueError, match="slot_mapping"):
            op(**arguments, variant=variant)
        assert same_bits(pool, before)
        op(**arguments, variant=variant, check_values=False)
        assert same_bits(np.delete(pool, 14, axis=0), np.delete(before, 14, axis=0))
        assert same_bits(pool[14, :3], before[14, :3])
        assert same_bits(pool[14, 3, :40], arguments["kv_c"][1])

    def test_a_cache_without_blocks(self, op, variant):
        arguments = problem(op)
        arguments["cache"] = arguments["cache"][:0].copy()
        op(**arguments, variant=variant, check_values=False)
        arguments["slot_mapping"][:] = -1
        op(**arguments, variant=variant)

    def test_pages_four_gigabytes_apart(self, op, variant):
        arguments = problem(op, bfloat16)
        width = arguments["cache"].shape[2]
        memory = np.zeros(2**31 + 128 + 2 * width, np.uint16).view(bfloat16)
        stride = 2 * (2**31 + 128)
        cache = np.lib.stride_tricks.as_strided(memory, (2, 1, width), (stride, 2 * width, 2))
        arguments["cache"] = cache
        arguments["slot_mapping"][:] = [1, -1, -1]
        op(**arguments, variant=variant)
        assert same_bits(cache[1, 0, :40], arguments["kv_c"][0])
        assert not bits_of(memory[: 128 + 2 * width]).any()

    def test_float32_row_of_a_single_latent(self, op, variant):
        dims = replace(PRESETS["tiny"], kv_lora_rank=1)
        arguments = problem(op, dims=dims)
        try:
            op(**arguments, variant=variant)
        except Unavailable as refusal:
            pytest.skip(str(refusal))
        rows = arguments["cache"].reshape(-1, dims.E)[arguments["slot_mapping"]]
        assert same_bits(rows[:, :1], arguments["kv_c"][:3])


@every_variant(*OPS)
class TestInputs:
    def test_stay_as_they_are_also_when_run_twice(self, op, variant):
        arguments = problem(op, bfloat16)
        before = {name: a.copy() for name, a in arguments.items() if a is not None}
        first = op(**arguments, variant=variant)
        once = arguments["cache"].copy()
        second = op(**arguments, variant=variant)
        assert same_bits(arguments["cache"], once)
        for name in set(before) - {"cache"}:
            assert same_bits(arguments[name], before[name]), name
        for one, other in zip(_tuple(first), _tuple(second)):
            assert same_bits(one, other)

    def test_may_be_longer_than_the_slots(self, op, variant):
        arguments = problem(op, bfloat16)
        short = {**arguments, "cache": arguments["cache"].copy()}
        short |= {n: a[:3] for n, a in short.items() if a is not None and n not in NOT_PER_TOKEN}
        expected = op(**short, variant=variant)
        rows = len(arguments["kv_c"])
        assert rows > 3
        given = {
            name: np.full((rows, *array.shape[1:]), 5, bfloat16)
            for name, array in zip(op.returns, _tuple(expected))
        }
        op(**{**arguments, **given}, variant=variant)
        assert same_bits(arguments["cache"], short["cache"])
        for array, want in zip(given.values(), _tuple(expected)):
            assert same_bits(array[:3], want)
            assert (array[3:] == 5).all()

    def test_key_with_an_axis_for_its_one_head(self, op, variant):
        arguments = problem(op, bfloat16)
        flat = {**arguments, "cache": arguments["cache"].copy()}
        expected = op(**flat, variant=variant)
        arguments["k_pe"] = arguments["k_pe"][:, None]
        got = op(**arguments, variant=variant)
        assert same_bits(arguments["cache"], flat["cache"])
        for one, other in zip(_tuple(got), _tuple(expected)):
            assert same_bits(one, other)


NOT_PER_TOKEN = ("cache", "cos_sin")


def _tuple(returned):
    return returned if isinstance(returned, tuple) else () if returned is None else (returned,)


@every_variant(*OPS, kinds=("cuda", "torch"))
@pytest.mark.parametrize("tokens", [0, 1, 33])
def test_counts_around_a_block_of_threads(op, variant, tokens):
    arguments = problem(op, tokens=(tokens,), context=(3,))
    op(**arguments, variant=variant)
    rows = arguments["cache"].reshape(-1, arguments["cache"].shape[2])
    assert same_bits(rows[arguments["slot_mapping"], :40], arguments["kv_c"][:tokens])


@every_variant(concat_insert_prefill)
class TestPrefill:
    @pytest.mark.parametrize("dtype", [np.float32, np.float16, bfloat16])
    def test_key_has_the_same_bits_in_every_head_and_in_the_cache(self, op, variant, dtype):
        arguments = problem(op, dtype)
        _, k_out = op(**arguments, variant=variant)
        rows = arguments["cache"].reshape(-1, 48)[arguments["slot_mapping"]]
        for head in range(k_out.shape[1]):
            assert same_bits(k_out[:, head, 24:], rows[:, 40:])

    def test_heads_are_written_for_tokens_without_a_slot(self, op, variant):
        arguments = problem(op, bfloat16)
        expected = op(**{**arguments, "cache": arguments["cache"].copy()}, variant=variant)
        arguments["slot_mapping"][:] = -1
        for one, other in zip(op(**arguments, variant=variant), expected):
            assert same_bits(one, other)

    def test_q_in_place_is_the_same_and_leaves_its_other_columns(self, op, variant):
        arguments = problem(op, bfloat16)
        expected, _ = op(**{**arguments, "cache": arguments["cache"].copy()}, variant=variant)
        q = arguments["q"]
        before = q.copy()
        q_out, _ = op(**{**arguments, "q_out": q}, variant=variant)
        assert q_out is q
        assert same_bits(q[:3], expected)
        assert same_bits(q[3:], before[3:])
        assert not same_bits(q[:3, :, 24:], before[:3, :, 24:])

    def test_position_outside_the_table_gives_nan_in_rotated_columns_only(self, op, variant):
        arguments = problem(op)
        arguments["positions"][:] = [-1, 2**40, 3]
        with pytest.raises(ValueError, match="positions"):
            op(**arguments, variant=variant)
        q_out, k_out = op(**arguments, variant=variant, check_values=False)
        rows = arguments["cache"].reshape(-1, 48)[arguments["slot_mapping"]]
        for heads in (q_out, k_out):
            assert np.isnan(heads[:2, :, 24:]).all()
            assert np.isfinite(heads[:, :, :24]).all()
            assert np.isfinite(heads[2]).all()
        assert np.isnan(rows[:2, 40:]).all()
        assert np.isfinite(rows[:, :40]).all()

    def test_without_rope_every_column_is_copied(self, op, variant):
        arguments = problem(op, bfloat16, dims=cases.NOT_ROTATED)
        arguments["k_pe"][0, 0] = np.nan
        q_out, k_out = op(**arguments, variant=variant)
        assert same_bits(q_out, arguments["q"][:3])
        assert same_bits(k_out[:, 2, 24:], arguments["k_pe"][:3])


@every_variant(concat_insert_decode)
class TestDecode:
    def test_latent_queries_are_copied_and_rotated_ones_match_the_cache(self, op, variant):
        arguments = problem(op, bfloat16)
        arguments["q_pe"][:, 1] = arguments["k_pe"]
        q_out = op(**arguments, variant=variant)
        rows = arguments["cache"].reshape(-1, 48)[arguments["slot_mapping"]]
        assert same_bits(q_out[..., :40], arguments["ql_nope"][:3])
        assert same_bits(q_out[:, 1, 40:], rows[:, 40:])

    def test_without_rope_every_column_is_copied(self, op, variant):
        arguments = problem(op, bfloat16, dims=cases.NOT_ROTATED)
        q_out = op(**arguments, variant=variant)
        assert same_bits(q_out[..., 40:], arguments["q_pe"][:3])

    def test_no_rope_columns_at_all(self, op, variant):
        arguments = problem(op, dims=cases.NO_ROPE_COLUMNS)
        assert arguments["k_pe"] is None
        q_out = op(**arguments, variant=variant)
        assert same_bits(q_out, arguments["ql_nope"][:3])


@pytest.mark.parametrize("op", [concat_insert_prefill, concat_insert_decode])
@pytest.mark.parametrize("dtype", [np.float32, bfloat16])
@pytest.mark.parametrize("dims", [PRESETS["tiny"], cases.ODD], ids=["tiny", "odd"])
def test_fused_and_unfused_agree_bit_for_bit(op, dtype, dims):
    variants = ["raw_element", "raw_fused", "raw_unfused"]
    if reason := op.variants["raw_fused"].unavailable("host"):
        pytest.skip(reason)
    results = []
    for variant in variants:
        arguments = problem(op, dtype, dims=dims, skipped=True)
        arguments["cache"][...] = 1
        returned = _tuple(op(**arguments, variant=variant))
        results.append([*returned, arguments["cache"]])
    for other in results[1:]:
        assert all(same_bits(one, two) for one, two in zip(results[0], other))


def test_rope_is_multiplication_by_a_unit_complex_number(rng):
    tokens, heads, width = 5, 3, 8
    x = rng.standard_normal((tokens, heads, width))
    positions = np.array([0, 1, 7, 1000, 31])
    got = reference.rope(x, positions, cases.rope_table(1001, width))
    numbers = x[..., 0::2] + 1j * x[..., 1::2]
    angles = positions[:, None] / 10000.0 ** (np.arange(4) / 4)
    turned = numbers * np.exp(1j * angles)[:, None]
    np.testing.assert_allclose(got[..., 0::2], turned.real, atol=1e-6)
    np.testing.assert_allclose(got[..., 1::2], turned.imag, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(got, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-6)


@every_variant(*OPS, kinds=("cuda", "torch"))
@settings(max_examples=6, deadline=None, database=None, derandomize=True)
@given(
    lens=st.lists(st.integers(0, 20), max_size=3),
    block_size=st.integers(1, 7),
    bits=st.integers(0, 2**12),
    seed=st.integers(0, 99),
)
def test_random_batches(op, variant, lens, block_size, bits, seed):
    workload = Workload("random", tuple(range(len(lens))), tuple(lens))
    case = Case(PRESETS["tiny"], "tiny", bfloat16, workload, {"block_size": block_size}, seed=seed)
    arguments = conformance.prepare(op, case, np)
    places = arguments["slot_mapping"]
    places[[bool(bits >> i % 12 & 1) for i in range(len(places))]] = -1 - seed
    checked = conformance.checked_arguments(op, arguments)
    expected = op.reference(**checked)
    op(**arguments, variant=variant)
    tolerances = op.tolerance(case)
    for name in op.written(arguments):
        _, message = conformance.distance(arguments[name], expected[name], tolerances[name])
        assert not message, f"{name}: {message}"


def test_cost_counts_what_a_call_moves():
    dims = PRESETS["deepseek_v3"]
    workload = Workload("two", (0, 5), (1, 3))
    case = Case(dims, "v3", bfloat16, workload, {"block_size": 64, "in_place": True})
    row, heads = 576 * 2, 128 * 2
    insert = concat_insert.cost(case)
    assert (insert.bytes_read, insert.bytes_written) == (4 * (row + 8), 4 * row)
    prefill = concat_insert_prefill.cost(case)
    positions = 4 * 8 + 4 * 64 * 4
    assert prefill.bytes_read == 4 * (heads * (64 + 128) + row + 8) + positions
    assert prefill.bytes_written == 4 * (heads * (64 + 192) + row)
    decode = concat_insert_decode.cost(replace(case, workload=Workload("one", (9,), (1,))))
    assert decode.bytes_read == 129 * row + 8 + 8 + 64 * 4
    assert decode.bytes_written == 129 * row


@pytest.mark.parametrize("op", OPS)
def test_no_work_is_no_case(op):
    nobody = Workload("nobody", (), ())
    assert op.workload_case(PRESETS["tiny"], "tiny", bfloat16, nobody, "small") is None
    some = Workload("some", (3, 0), (5, 1))
    case = op.workload_case(PRESETS["tiny"], "tiny", bfloat16, some, "small")
    tokens = {concat_insert: 6, concat_insert_prefill: 5, concat_insert_decode: 1}[op]
    assert op.make_inputs(case, np)["slot_mapping"].shape == (tokens,)
