"""Traces: parsing, prefix hits, batches of a server, the generator, scaling."""

import json

import numpy as np
import pytest

from experiments import workloads
from experiments.workloads import Generator, Limits, Request, Server, TraceError
from sandbox.kernels.case import Workload


def write(path, *requests):
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("".join(json.dumps(dict(zip(keys, each))) + "\n" for each in requests))
    return path


def test_read_trace_sorts_by_timestamp(tmp_path):
    path = write(tmp_path / "t.jsonl", (70, 600, 3, [1, 2]), (5, 10, 1, [9]))
    path.write_text(path.read_text() + "\n")
    assert workloads.read_trace(path) == [
        Request(5, 10, 1, (9,)),
        Request(70, 600, 3, (1, 2)),
    ]


def line(**changes):
    request = {"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": [], **changes}
    return json.dumps(request).encode()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "Expecting property name"),
        (b"[1]", "expected an object, got list"),
        (b'{"timestamp": 1, "input_length": 5, "output_length": 1}', "hash_ids is missing"),
        (line(timestamp="x"), "timestamp is 'x'"),
        (line(timestamp=True), "timestamp is True"),
        (line(timestamp=float("nan")), "timestamp is nan, expected milliseconds"),
        (line(timestamp=float("inf")), "timestamp is inf"),
        (line(timestamp=-1), "timestamp is -1"),
        (line(timestamp=10**400), "timestamp is 1000"),
        (line(input_length=0), "input_length is 0, expected an integer from 1 to"),
        (line(input_length=float("nan")), "input_length is nan"),
        (line(input_length=10**12), "input_length is 1000000000000"),
        (line(output_length=-1), "output_length is -1"),
        (line(output_length=float("inf")), "output_length is inf"),
        (line(output_length=10**9), "output_length is 1000000000"),
        (line(hash_ids=[1.5]), "hash_ids is not a list of integers"),
        (b"[" * 100_000, "recursion"),
        ('{"timestamp": "\u00e4"}'.encode("latin-1"), "not UTF-8 text"),
        (b"\x89PNG\r", "not UTF-8 text"),
        (b"\x00\x01\x02", "line 2"),
    ],
)
def test_malformed_lines_are_named(tmp_path, text, message):
    path = write(tmp_path / "t.jsonl", (0, 5, 1, [1]))
    path.write_bytes(path.read_bytes() + text + b"\n")
    with pytest.raises(TraceError, match=message) as caught:
        workloads.read_trace(path)
    assert f"{path}, line 2" in str(caught.value)


def test_missing_and_empty_files_are_named(tmp_path):
    with pytest.raises(TraceError, match="nowhere"):
        workloads.read_trace(tmp_path / "nowhere")
    with pytest.raises(TraceError, match="directory"):
        workloads.read_trace(tmp_path)
    for text in ("", "\n", "\r\n  \n"):
        (tmp_path / "empty").write_text(text)
        with pytest.raises(TraceError, match="no request"):
            workloads.read_trace(tmp_path / "empty")


def test_prefix_hits_are_the_leading_run_of_seen_blocks():
    requests = [
        Request(0, 1100, 1, (0, 1, 2)),  # nothing seen
        Request(1, 1200, 1, (0, 1, 9)),  # two blocks
        Request(2, 1030, 1, (7, 1, 2)),  # a hit after a miss is none
        Request(3, 1100, 1, (0, 1, 2)),  # the whole prompt: one token is left to compute
        Request(4, 513, 1, (0,)),  # an id short of its length
    ]
    assert workloads.split_prefixes(requests) == [
        (0, 1100),
        (1024, 176),
        (0, 1030),
        (1099, 1),
        (512, 1),
    ]


def lens(step):
    return step.decode_contexts.tolist(), list(step.prefills)


def test_server_chunks_prompts_and_generates_meanwhile():
    requests = [Request(0, 25, 3, (1,)), Request(0, 7, 2, (2,)), Request(10, 4, 1, (3,))]
    server = Server(token_budget=10, max_requests=4, step_ms=10)
    steps = [lens(step) for step in workloads.serve(requests, server)]
    assert steps == [
        ([], [(0, 10)]),
        ([], [(10, 10)]),
        ([], [(20, 5), (0, 5)]),
        ([25], [(5, 2), (0, 4)]),
        ([26, 7], []),
    ]


def test_server_admits_no_more_than_max_requests_and_skips_idle_time():
    requests = [Request(0, 3, 2, (1,)), Request(0, 5, 1, (2,)), Request(1e6, 6, 1, (3,))]
    server = Server(token_budget=10, max_requests=1, step_ms=10)
    steps = [lens(step) for step in workloads.serve(requests, server)]
    assert steps == [([], [(0, 3)]), ([3], []), ([], [(0, 5)]), ([], [(0, 6)])]


def test_server_starts_prompts_behind_their_cached_prefix():
    requests = [Request(0, 600, 1, (1, 2)), Request(1, 700, 1, (1, 3))]
    server = Server(token_budget=1024, max_requests=8, step_ms=10)
    steps = [lens(step) for step in workloads.serve(requests, server)]
    assert steps == [([], [(0, 600)]), ([], [(512, 188)])]


def test_server_refuses_a_budget_that_generation_could_use_up():
    with pytest.raises(ValueError, match="max_requests"):
        list(workloads.serve([], Server(token_budget=8, max_requests=8)))


def test_picked_batches_are_spread_and_mixed():
    busy = workloads.Step(np.array([5]), ((0, 8),))
    quiet = workloads.Step(np.array([6, 7]), ())
    steps = [busy, quiet, quiet, busy, quiet, quiet, busy, quiet]
    assert workloads.pick(steps, 4) == [0, 3, 4, 6]
    assert workloads.pick(steps, 3) == [0, 3, 6]
    assert workloads.pick([busy], 4) == [0]
    assert workloads.pick([], 4) == []


def test_workload_has_generating_requests_first():
    step = workloads.Step(np.array([70, 9]), ((512, 30), (0, 4)))
    assert workloads.workload("w", step) == Workload("w", (70, 9, 512, 0), (1, 1, 30, 4))


def test_generator_is_seeded_and_looks_like_a_trace():
    made = Generator(requests=300)(seed=3)
    assert made == Generator(requests=300)(seed=3)
    assert made != Generator(requests=300)(seed=4)
    assert [r.timestamp for r in made] == sorted(r.timestamp for r in made)
    assert all(len(r.hash_ids) == -(-r.input_length // 512) for r in made)
    assert 5000 < np.median([r.input_length for r in made]) < 12000
    cached = sum(cached for cached, _ in workloads.split_prefixes(made))
    assert 0.2 < cached / sum(r.input_length for r in made) < 0.6


def test_division_keeps_zero_and_nothing_else_zero():
    scaled = workloads.divide(Workload("w", (0, 1, 64, 65), (1, 1, 7, 128)), 64)
    assert scaled.workload == Workload("w_div64", (0, 1, 1, 2), (1, 1, 1, 2))
    assert scaled.description == "lengths divided by 64"


def test_scaling_down_states_what_it_did():
    original = Workload("w", (1000,) * 9 + (40,), (1,) * 9 + (500,))
    scaled = workloads.scale_down(original, Limits(requests=5, context_tokens=600, query_tokens=99))
    assert scaled.workload == Workload("w_div8_1in2", (125, 125, 125, 125, 5), (1, 1, 1, 1, 63))
    assert scaled.description == "lengths divided by 8, 1 in 2 requests"
    untouched = workloads.scale_down(original, Limits(10, 10**6, 10**6))
    assert untouched.workload == original
    assert not untouched.description


def test_scaling_down_ends_where_a_limit_cannot_be_met():
    scaled = workloads.scale_down(Workload("w", (9,) * 4, (1,) * 4), Limits(4, 2, 1))
    assert scaled.workload.context_lens == (1,) * 4
