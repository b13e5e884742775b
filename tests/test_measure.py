"""The arithmetic of measuring, and what GPU timing does with it."""

from dataclasses import replace

import numpy as np
import pytest
from numpy_as_cupy import NumpyAsCupy

from experiments import measure, tables
from experiments.results import Row, Timing, with_times
from sandbox.kernels import OPS, conformance

MIB = 1 << 20


@pytest.mark.parametrize(
    ("touched", "sets", "cold"),
    [
        (1 * MIB, 122, True),
        (60 * MIB, 4, True),
        (119 * MIB, 3, True),
        (121 * MIB, 2, True),
        (4000 * MIB, 2, True),
        (100 * 1024, 256, False),
        (0, 256, False),
    ],
)
def test_rotation_is_cold_only_beyond_twice_l2(touched, sets, cold):
    found = measure.rotation(touched, 60 * MIB)
    assert (found.sets, found.cold) == (sets, cold)
    assert found.cold == (found.reuse_bytes > 2 * 60 * MIB)
    if cold:
        assert (found.sets - 2) * touched <= 2 * 60 * MIB, "one set fewer would do"


def test_rotation_within_a_memory_limit_is_not_called_cold():
    found = measure.rotation(60 * MIB, 60 * MIB, most_sets=3)
    assert found == measure.Rotation(3, 120 * MIB, False)
    assert found.l2 == "warm"
    assert measure.rotation(60 * MIB, 60 * MIB, most_sets=1).sets == 1


@pytest.mark.parametrize(("sets", "us", "count"), [(4, 2.0, 500), (256, 2.0, 512), (2, 900.0, 2)])
def test_a_replay_is_whole_turns_through_the_sets(sets, us, count):
    assert measure.launches(sets, us) == count


def test_everyone_goes_first_equally_often():
    names = ["a", "b", "c"]
    rounds = [measure.order(names, number) for number in range(6)]
    assert rounds[0] == ["a", "b", "c"]
    assert rounds[1] == ["b", "c", "a"]
    assert rounds[3] == ["c", "b", "a"]
    assert all(sorted(each) == names for each in rounds)
    assert sorted(each[0] for each in rounds) == ["a", "a", "b", "b", "c", "c"]
    assert measure.order([], 3) == []


def test_rounds_end_by_time_but_never_too_few():
    assert not measure.enough(0, 100.0, 1.0)
    assert not measure.enough(19, 5.0, 1.0)
    assert measure.enough(20, 1.0, 1.0)
    assert not measure.enough(20, 0.9, 1.0)
    assert measure.enough(200, 0.0, 1.0)
    assert measure.enough(5, 10.0, 1.0)
    assert not measure.enough(4, 10.0, 1.0)


def test_spread_is_median_and_quartiles():
    found = measure.spread([1.0, 2.0, 3.0, 4.0, 1000.0])
    assert (found.q25, found.median, found.q75, found.iqr) == (2.0, 3.0, 4.0, 2.0)
    with pytest.raises(ValueError, match="no samples"):
        measure.spread([])


def test_rates():
    found = measure.rates(4.0, 3.0, 10.0, 8_000_000, flops=12_000_000, gemm_tflop_per_s=5.0)
    assert found == {
        "gb_per_s": 2000.0,
        "tflop_per_s": 3.0,
        "percent_of_gemm": pytest.approx(60),
        "percent_of_copy": 75.0,
        "copy_ratio": pytest.approx(4 / 3),
        "limit_us": 3.0,
        "limit_by": "memory",
        "percent_of_limit": 75.0,
        "speedup": 2.5,
    }
    alone = measure.rates(4.0, None, None, bytes_moved=8, flops=0)
    assert set(alone) == set(found)
    assert {name for name, value in alone.items() if value is not None} == {"gb_per_s"}


@pytest.mark.parametrize(
    ("copy_us", "flops", "gemm", "expected"),
    [
        (3.0, 12_000_000, 5.0, measure.Limit(3.0, "memory")),
        (2.0, 12_000_000, 5.0, measure.Limit(2.4, "compute")),
        (3.0, 0, 5.0, measure.Limit(3.0, "memory")),
        (3.0, 0, None, measure.Limit(3.0, "memory")),
        (3.0, 12_000_000, None, None),
        (None, 12_000_000, 5.0, None),
    ],
)
def test_the_limit_is_the_larger_floor_and_none_where_one_is_unknown(
    copy_us, flops, gemm, expected
):
    assert measure.limit(copy_us, flops, gemm) == expected


def row(variant, status="PASSED", target="gpu", baseline=False, flops=0):
    return Row(
        op="gather",
        variant=variant,
        kind="cuda",
        target=target,
        baseline=baseline,
        case="some-case",
        dims_name="tiny",
        dims={},
        dtype="bfloat16",
        options={},
        workload={"requests": 1, "context_tokens": 5, "query_tokens": 1},
        scaled="",
        size="small",
        seed=0,
        bytes=4_000_000,
        flops=flops,
        reproduce="again",
        status=status,
        check_host_seconds=0.5,
    )


def timing(*samples_us):
    return Timing(samples_us, launches=8, sets=4, l2="cold", method="graph", copy_us=2.0)


def test_rows_get_times_speedups_and_ranks():
    rows = [row("slow", baseline=True), row("fast"), row("alike"), row("untimed")]
    timings = {
        "slow": timing(8.0, 8.0, 8.0),
        "fast": timing(2.0, 2.0, 2.4),
        "alike": timing(2.1, 2.1, 2.1),
    }
    slow, fast, alike, untimed = with_times(rows, timings)
    assert (slow.rank, fast.rank, alike.rank, untimed.rank) == (3, 1, 1, None)
    assert fast.median_us == 2.0
    assert fast.speedup == 4.0
    assert fast.percent_of_copy == 100.0
    assert fast.gb_per_s == 2000.0
    assert fast.samples_us == (2.0, 2.0, 2.4)
    assert slow.speedup == 1.0
    assert untimed.median_us is None


def test_rows_that_compute_get_shares_of_the_gemm_and_of_the_limit():
    rows = [row("fast", flops=3_200_000_000), row("untimed", flops=3_200_000_000), row("moves")]
    timings = {name: timing(8.0) for name in ("fast", "moves")}
    fast, untimed, moves = with_times(rows, timings, gemm_tflop_per_s=800.0)
    assert fast.tflop_per_s == fast.percent_of_gemm * 8 == 400.0
    assert (fast.limit_us, fast.limit_by, fast.percent_of_limit) == (4.0, "compute", 50.0)
    assert fast.gemm_tflop_per_s == 800.0
    assert untimed.percent_of_gemm is untimed.limit_us is untimed.gemm_tflop_per_s is None
    assert moves.tflop_per_s is moves.percent_of_gemm is None
    assert (moves.limit_us, moves.limit_by, moves.percent_of_limit) == (2.0, "memory", 25.0)
    (unknown,) = with_times(rows[:1], timings)
    assert unknown.tflop_per_s == 400.0
    assert unknown.percent_of_gemm is unknown.limit_us is unknown.percent_of_limit is None


@pytest.mark.parametrize("status", ["WRONG", "ERROR", "UNAVAILABLE"])
def test_no_time_is_shown_for_what_did_not_pass(status):
    good, bad = with_times(
        [row("good"), row("bad", status)], {"good": timing(9.0), "bad": timing(1.0)}
    )
    assert good.rank == 1
    assert bad.median_us is bad.rank is bad.gb_per_s is None
    assert bad.samples_us == ()
    table = tables.text_table("gather", [good, bad])
    line = next(each for each in table.splitlines() if each.split()[:1] == ["bad"])
    assert line.split() == ["bad", status]


@pytest.mark.parametrize("target", ["host", "sim", "cpu"])
def test_host_times_are_never_gpu_times_nor_ranked(target):
    (found,) = with_times([row("here", target=target)], {"here": timing(1.0)})
    assert found.median_us is found.rank is found.speedup is None
    headings, line = tables.text_table("gather", [found]).splitlines()[1:4:2]
    assert "not a GPU time" in headings
    assert line.split() == ["here", target, "PASSED", "0.50"]


def test_ranks_ignore_a_host_row_that_claims_a_time():
    claims = {"variant": "x", "target": "host", "status": "PASSED", "median_us": 1.0}
    assert measure.ranks([claims]) == {}


@pytest.mark.parametrize("flops", [0, 40_000_000_000_000])
def test_gpu_table_fits_a_terminal(flops):
    rows = [
        row("numba_vector_wide", flops=flops),
        row("raw_two_rows_each", "UNAVAILABLE", flops=flops),
    ]
    rows = [replace(each, case="deepseek_v3-bfloat16-64x8192-block_size=64" * 2) for each in rows]
    slow = Timing((123456.7, 123999.0), 4, 2, "cold", "graph", 9876.5, 123.4)
    timed = with_times(rows, {rows[0].variant: slow}, 793.2)
    lines = [line for _, line in tables.text_lines("gather", timed)]
    assert max(map(len, lines)) <= 120
    assert "123728" in lines[-2]


@pytest.fixture
def timing_module(monkeypatch):
    pytest.importorskip("cupy")
    from experiments import gpu_timing, gpu_work

    small_l2 = type("Device", (), {"l2_bytes": 40_000})()
    monkeypatch.setattr(gpu_timing, "device_info", lambda: small_l2)
    monkeypatch.setattr(gpu_timing.Filler, "BYTES", 64)
    monkeypatch.setattr(gpu_timing.measure, "REPLAY_US", 1.0)
    monkeypatch.setattr(gpu_timing.measure, "MAX_ROUNDS", 20)
    for module in (gpu_timing, gpu_work):
        monkeypatch.setattr(module, "cp", NumpyAsCupy(20.0))
        monkeypatch.setattr(module, "copy_bytes", lambda target, source: None)
    return gpu_timing


def passing_case():
    return next(case for case in OPS["gather"].cases("compare") if case.size == "small")


def reference_as(name, run=None):
    known = OPS["gather"].variants["reference"]
    return replace(known, name=name, run=run or known.run)


def run_timing(module, variants):
    stages = []
    found = module.time_case(OPS["gather"], variants, passing_case(), 9.0, stages.append)
    return found, stages


def test_what_cannot_be_captured_is_timed_eagerly_with_a_note(timing_module, monkeypatch):
    def refuse(name, calls, launches):
        if name == timing_module.COPY:
            return timing_module.eager(name, calls, "")
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(timing_module, "captured", refuse)
    found, stages = run_timing(timing_module, [reference_as("a"), reference_as("b")])
    assert found["wrong"] == {}
    assert stages == ["copy", "a", "b", "copy", "a", "b"]
    for columns in found["timings"].values():
        made = Timing(**columns)
        sets = measure.rotation(OPS["gather"].cost(passing_case()).bytes, 40_000).sets
        assert made.method == "eager"
        assert "operation not permitted" in made.note
        assert "more" not in made.note
        assert (made.sets, made.launches, made.l2) == (sets, sets, "cold")
        assert len(made.samples_us) == 20
        assert set(made.samples_us) == {20.0 / sets}
        assert made.copy_us == 20.0 / sets


def test_a_graph_that_does_nothing_is_wrong_after_the_loop(timing_module):
    found, _ = run_timing(timing_module, [reference_as("empty_graph")])
    assert found["timings"] == {}
    assert "must match bit for bit" in found["wrong"]["empty_graph"]


def test_calls_that_keep_a_gpu_busy_are_few(timing_module, monkeypatch):
    for busy_us, calls in ((0.0, 40), (20.0, 40), (5_000.0, 11), (3e6, 1)):
        monkeypatch.setattr(timing_module, "elapsed_us", lambda call, us=busy_us: us)
        made = []
        assert timing_module.eager_launch_us(lambda made=made: made.append(1)) > 0
        assert len(made) == calls * timing_module.EAGER_BATCHES


def test_a_failing_variant_is_blamed_by_name(timing_module):
    def fail(**arguments):
        raise RuntimeError("an illegal memory access")

    variants = [reference_as("good"), reference_as("bad", fail)]
    with pytest.raises(measure.VariantFailed) as caught:
        run_timing(timing_module, variants)
    assert caught.value.variant == "bad"
    assert "illegal" in str(caught.value.__cause__)


def test_variants_share_inputs_but_no_output(timing_module):
    op = OPS["gather"]
    arguments = conformance.prepare(op, passing_case(), np)
    sets = timing_module.ArgumentSets(op, arguments, ["a", "b"], 3)
    of_a, of_b = sets._guarded["a"], sets._guarded["b"]
    assert len(of_a) == 3
    for one, other in zip(of_a, of_b):
        assert one["cache"] is other["cache"]
        assert not np.shares_memory(one["out"].array, other["out"].array)
    assert not np.shares_memory(of_a[0]["cache"].array, of_a[1]["cache"].array)
    inputs = sum(a.nbytes for n, a in arguments.items() if hasattr(a, "nbytes") and n != "out")
    expected = inputs + 2 * arguments["out"].nbytes
    assert timing_module.ArgumentSets.bytes_of_set(op, arguments, 2) == expected


def test_a_call_in_place_is_checked_by_itself_after_the_loop(timing_module):
    op = OPS["concat_insert_prefill"]
    case = next(c for c in op.cases("compare") if c.size == "small" and "in_place" in c.options)
    arguments = conformance.prepare(op, case, np)
    assert timing_module.ArgumentSets(op, arguments, ["a"], 1).in_place
    again = replace(op.variants["reference"], name="again")
    found = timing_module.time_case(op, [again], case, 9.0, lambda stage: None)
    assert found["wrong"] == {}
    assert "again" in found["timings"]


@pytest.mark.gpu
def test_a_variant_against_itself_is_a_tie():
    from experiments import gpu_timing

    op = OPS["gather"]
    case = next(c for c in op.cases("compare") if c.workload.name == "8x1024")
    tile = op.variants["raw_tile"]
    twins = [replace(tile, name="one"), replace(tile, name="other")]
    found = gpu_timing.time_case(op, twins, case, 0.5, lambda stage: None)
    assert not found["wrong"]
    one, other = (measure.spread(found["timings"][t]["samples_us"]) for t in ("one", "other"))
    assert found["timings"]["one"]["method"] == "graph"
    assert found["timings"]["one"]["l2"] == "cold"
    assert abs(one.median - other.median) < max(one.iqr, other.iqr, 0.03 * one.median)
    assert 0 < found["timings"]["one"]["copy_us"] < one.median * 2


@pytest.mark.parametrize("moved", [1, 31, 2312, 151_011_356, 1_496_318_720, 4 << 30])
def test_copies_are_whole_units_of_hardly_more_bytes(moved):
    copied = measure.copy_bytes_for(moved)
    assert copied >= moved / 2
    assert copied - moved / 2 <= max(16, 0.002 * moved) or moved < 1 << 17
    assert copied % 16 == 0
    assert copied % 65536 == 0 or moved < 1 << 26


def test_auto_follows_a_preference_that_depends_on_the_arguments():
    from sandbox.kernels import lse_merge

    tile, vector = (lse_merge.variants[name] for name in ("raw_tile", "raw_vector"))
    few, many = ({"prefix": np.empty((tokens, 2, 8), np.float32)} for tokens in (1, 64))
    assert tile.preferred(few) < vector.preferred(few)
    assert tile.preferred(many) > vector.preferred(many)
