"""Serving a trace: the cache's blocks, the server's steps, the replay's page."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments import replay_page
from experiments.block_pool import BlockPool
from experiments.csv_trace import read_csv_trace
from experiments.replay_run import Setup, demand, grouped, prefix_hits, replay
from experiments.serving import Policy, Server
from experiments.workloads import Generator, Request, TraceError
from sandbox.dims import PRESETS
from sandbox.planner import ContextParallel, workspace_of

ROOT = Path(__file__).resolve().parents[1]
quick = settings(max_examples=60, deadline=None, database=None, derandomize=True)


class TestBlockPool:
    def test_prefix_is_shared_once_it_is_computed(self):
        pool = BlockPool(12, 4, 8)
        first = pool.take([1, 2], 20, 22)
        assert (first.cached_tokens, len(first.blocks), pool.held_blocks) == (0, 6, 6)
        aside = pool.take([1, 2], 20, 20)
        assert aside.cached_tokens == 0
        assert not set(aside.blocks) & set(first.blocks)
        pool.give_back(aside)
        pool.computed(first)
        second = pool.take([1, 3], 18, 18)
        assert second.cached_tokens == 8
        assert second.blocks[:2].tolist() == first.blocks[:2].tolist()
        assert len(set(second.blocks[2:]) & set(first.blocks)) == 0
        assert pool.held_blocks == 6 + 3

    def test_a_token_of_the_prompt_is_left_to_compute(self):
        pool = BlockPool(9, 4, 8)
        pool.computed(pool.take([1], 8, 9))
        assert pool.take([1], 8, 9).cached_tokens == 7

    def test_no_room_takes_nothing_and_the_oldest_prefix_goes_first(self):
        pool = BlockPool(6, 4, 8)
        for key in (1, 2):
            held = pool.take([key], 8, 8)
            pool.computed(held)
            pool.give_back(held)
        assert (pool.cached_blocks, pool.held_blocks) == (4, 0)
        assert pool.take([], 28, 28) is None
        big = pool.take([], 16, 16)
        assert pool.evicted == 1
        assert pool.take([2], 8, 8).cached_tokens == 7
        pool.give_back(big)
        assert pool.take([1], 8, 8).cached_tokens == 0

    def test_of_one_prompt_the_last_group_goes_first(self):
        pool = BlockPool(6, 4, 8)
        held = pool.take([1, 2, 3], 24, 24)
        pool.computed(held)
        pool.give_back(held)
        pool.give_back(pool.take([], 8, 8))
        assert pool.evicted == 1
        assert pool.take([1, 2, 3], 24, 24).cached_tokens == 16

    @quick
    @given(
        orders=st.lists(
            st.tuples(st.lists(st.integers(0, 4), max_size=4), st.integers(0, 9)), max_size=20
        ),
        seed=st.integers(0, 9),
    )
    def test_no_block_is_held_twice_or_lost(self, orders, seed):
        rng = np.random.default_rng(seed)
        pool, held = BlockPool(20, 2, 4), []
        for keys, extra in orders:
            if held and rng.random() < 0.4:
                pool.give_back(held.pop(rng.integers(len(held))))
            prompt = 4 * len(keys) + extra + 1
            holding = pool.take(keys, prompt, prompt + 2)
            if holding is None:
                continue
            assert len(holding.blocks) == pool.blocks_for(prompt + 2)
            assert holding.cached_tokens < prompt
            held.append(holding)
            if rng.random() < 0.7:
                pool.computed(holding)
            private = [block for each in held for block in each.own]
            assert len(private) == len(set(private))
            shared = {key: None for each in held for key in each.keys}
            assert pool.held_blocks == len(private) + 2 * len(shared)
            for each in held:
                assert len(set(each.blocks.tolist())) == len(each.blocks)
        for each in held:
            pool.give_back(each)
        assert pool.held_blocks == 0

    @pytest.mark.parametrize("bad", [(0, 4, 8), (4, 0, 8), (4, 3, 8)])
    def test_refusals(self, bad):
        with pytest.raises(ValueError, match="group"):
            BlockPool(*bad)


class TestServer:
    def test_every_token_is_computed_once_in_order(self):
        requests = Generator(requests=30, input_median=300, output_median=20, input_longest=2000)(3)
        server = Server(requests, BlockPool(2000, 16, 512), Policy(64, 8, 50.0))
        tokens = 0
        for step in server.steps():
            decodes = ~step.is_prefill
            assert (step.query_lens[decodes] == 1).all()
            assert step.query_lens.sum() <= 64
            assert len(step.query_lens) <= 8
            last = (step.context_lens + step.query_lens - 1) // 16
            blocks = step.block_table[np.arange(len(last)), last][step.query_lens > 0]
            assert len(set(blocks.tolist())) == len(blocks)
            tokens += int(step.query_lens.sum())
        totals = server.totals
        assert totals.finished == len(requests)
        assert totals.generated_tokens == sum(r.output_length for r in requests)
        computed = totals.prompt_tokens - totals.cached_tokens
        assert tokens == computed + totals.generated_tokens - len(requests)
        assert totals.cached_tokens > 0
        assert len(totals.first_token_ms) == len(requests)
        assert min(totals.first_token_ms) >= 50.0

    def test_a_request_that_never_fits_is_refused_and_others_go_on(self):
        requests = [Request(0, 100, 5, ()), Request(0, 10, 2, ())]
        server = Server(requests, BlockPool(4, 8, 8), Policy(16, 4, 1.0))
        assert len(list(server.steps())) == 2
        assert (server.totals.refused, server.totals.finished) == (1, 1)

    def test_waits_for_room(self):
        requests = [Request(0, 16, 4, ()), Request(0, 16, 4, ())]
        server = Server(requests, BlockPool(3, 8, 8), Policy(64, 4, 1.0))
        running = [len(step.query_lens) for step in server.steps()]
        assert max(running) == 1
        assert server.totals.finished == 2

    def test_a_request_without_output_is_given_a_token(self):
        server = Server([Request(0, 16, 0, ())], BlockPool(3, 8, 8), Policy(64, 4, 1.0))
        assert [step.block_table.shape for step in server.steps()] == [(1, 3)]
        assert server.totals.generated_tokens == 1

    def test_first_come_first_served(self):
        # Of four, the first ends early; the others' prompts are computed in order of arrival.
        lengths = [(1, 1), (30, 3), (20, 2), (10, 1)]
        requests = [Request(0, prompt, output, ()) for prompt, output in lengths]
        server = Server(requests, BlockPool(99, 8, 8), Policy(8, 4, 1.0))
        computed = [step.query_lens.tolist() for step in server.steps()]
        assert computed[:4] == [[1, 7, 0, 0], [8, 0, 0], [8, 0, 0], [7, 1, 0]]
        assert server.totals.first_token_ms == [1.0, 4.0, 7.0, 8.0]
        assert server.totals.queued_at_last_arrival == 2
        assert server.totals.steps_short_of_budget == 7

    @pytest.mark.parametrize("bad", [(8, 8, 1.0), (8, 0, 1.0), (8, 2, 0.0), (8, 2, float("inf"))])
    def test_refusals(self, bad):
        with pytest.raises(ValueError, match=r"--budget|--step-ms"):
            Policy(*bad)


def setup(**changes):
    options = {
        "dims": PRESETS["deepseek_v3"],
        "layers": 1,
        "cache_format": "bfloat16",
        "ranks": 1,
        "memory_bytes": 10**8,
        "block_size": 64,
        "policy": Policy(512, 16, 50.0),
        "workspaces": (512, 2048),
        "strategies": ("in_order", "fewest_merges"),
    }
    return Setup(**{**options, **changes})


REQUESTS = Generator(requests=40, input_median=1500, output_median=20, input_longest=8000)(1)


class TestReplay:
    @pytest.mark.parametrize("ranks", [1, 2, 3])
    def test_plans_of_all_steps(self, ranks):
        record = replay(REQUESTS, setup(ranks=ranks), lambda totals, step: None)
        assert record.totals.finished + record.totals.refused == len(REQUESTS)
        lengths = {len(values) for values in record.timeline.values()}
        assert len(lengths) == 1
        by_name = {(c.workspace, c.strategy): c for c in record.compared}
        for each in record.compared:
            assert sum(each.chunks) >= each.least
        for workspace in (512, 2048):
            pair = [by_name[workspace, name] for name in ("fewest_merges", "in_order")]
            assert sum(pair[0].chunks) <= sum(pair[1].chunks)
        small, large = (by_name[w, "in_order"] for w in (512, 2048))
        assert sum(small.chunks) > sum(large.chunks)
        assert small.peak_bytes < large.peak_bytes
        planned = record.column("chunks")[record.column("context_rows") > 0]
        assert planned.tolist() == small.chunks

    def test_demand_is_what_an_endless_cache_would_hold(self):
        wide = setup(memory_bytes=10**9)
        record = replay(REQUESTS, wide, lambda totals, step: None)
        assert not record.evicted
        assert demand(REQUESTS, wide).tokens == record.column("held").max() * 64

    @pytest.mark.parametrize("ranks", [1, 3])
    def test_demand_counts_refused_requests_and_is_not_below_what_was_held(self, ranks):
        small = setup(memory_bytes=4 * 10**6 // ranks, ranks=ranks)
        record = replay(REQUESTS, small, lambda totals, step: None)
        assert record.totals.refused
        assert record.totals.steps_short_of_memory > record.totals.steps_short_of_rows
        wanted = demand(REQUESTS, small)
        assert wanted.totals.finished == len(REQUESTS)
        assert wanted.tokens >= record.column("held").max() * small.tokens_a_block
        assert wanted.tokens >= max(r.input_length + r.output_length for r in REQUESTS)

    def test_prefix_hits_grow_with_the_cache(self):
        requests = [Request(0, 1024, 1, ids) for ids in ((1, 2), (3, 4), (1, 2), (1, 9))]
        assert prefix_hits(requests, 0) == 0
        assert prefix_hits(requests, 2 * 512) == 512 / 4096
        assert prefix_hits(requests, 10**6) == (1023 + 512) / 4096

    def test_groups_of_several_trace_blocks(self):
        requests = [Request(0, 2048, 1, (1, 2, 3, 4, 5))]
        assert grouped(requests, 1024)[0].hash_ids == (2, 4)

    def test_a_cache_without_room_is_said(self):
        with pytest.raises(ValueError, match="do not hold one block"):
            replay(REQUESTS, setup(memory_bytes=10), lambda totals, step: None)


class TestPage:
    def page(self, requests=REQUESTS, **changes):
        chosen = setup(**changes)
        record = replay(requests, chosen, lambda totals, step: None)
        return " ".join(replay_page.answers(requests, chosen, record).split())

    def test_nobody_waits(self):
        page = self.page(memory_bytes=10**9, policy=Policy(8192, 256, 50.0))
        assert "None had to wait and none was refused." in page
        assert "groups of 512 tokens" in page

    def test_refused_requests_are_in_the_demand(self):
        page = self.page([Request(0, 5000, 0, ())], memory_bytes=10**6)
        assert "Refused, as longer than the whole cache: 1." in page
        assert "hold at most 5,056 tokens" in page
        assert "**7 GPU(s)**" in page

    def test_what_requests_waited_for(self):
        page = self.page(memory_bytes=10**9, policy=Policy(8192, 2, 50.0))
        assert "waited for one of the 2 (`--max-requests`)" in page
        assert "room in the cache" not in page
        assert "`--max-requests` 2 is the limit" in page
        page = self.page(memory_bytes=10**9, policy=Policy(64, 8, 50.0))
        assert "compute is the limit (`--budget` 64" in page
        page = self.page(memory_bytes=10**9, policy=Policy(64, 63, 50.0))  # none waits outside
        assert "compute is the limit (`--budget` 64" in page
        assert "requests waited for" not in page
        page = self.page(memory_bytes=10**7, policy=Policy(8192, 256, 50.0))
        assert "waited for room in the cache" in page

    @pytest.mark.parametrize("ranks", [1, 2])
    def test_workspace_as_a_share_of_the_cache(self, ranks):
        parallel = ContextParallel(2, 1, 64) if ranks == 2 else None
        full = workspace_of(2048, PRESETS["deepseek_v3"], parallel=parallel).total_bytes
        page = self.page(memory_bytes=10**9, ranks=ranks)
        assert f"| {100 * full / 1e9:.1f} % |" in page

    def test_chosen_format_is_in_the_table(self):
        assert "| float32 |" not in self.page()
        page = self.page(cache_format="float32")
        assert "| float32 |" in page
        assert "None GPU" not in page

    def test_a_trace_without_hash_ids_says_nothing_of_prefixes(self):
        bare = [Request(r.timestamp, r.input_length, r.output_length, ()) for r in REQUESTS]
        page = self.page(bare)
        assert "the trace has no hash ids" in page
        assert "0.0 %" not in page


def test_command_writes_the_page(tmp_path):
    trace = tmp_path / "trace.jsonl"
    lines = [
        json.dumps(
            {
                "timestamp": r.timestamp,
                "input_length": r.input_length,
                "output_length": r.output_length,
                "hash_ids": r.hash_ids,
            }
        )
        for r in REQUESTS
    ]
    trace.write_text("\n".join(lines))
    run = _replay(
        "--trace", trace, "--out", tmp_path / "out", "--budget", 512, "--max-requests", 16
    )
    assert run.returncode == 0, run.stderr
    page = (tmp_path / "out" / "answers.md").read_text()
    assert "How large a workspace?" in page
    assert "fp8_ds_mla" in page
    for name in ("timeline.jsonl", "plans.jsonl", "fingerprint.json", "timeline.png"):
        assert (tmp_path / "out" / name).stat().st_size > 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--model", "gpt"], "--model"),
        (["--format", "fp7"], "--format"),
        (["--model", "tiny", "--format", "fp8_ds_mla"], "multiple of 128"),
        (["--strategies", "luck"], "--strategies"),
        (["--workspaces", "many"], "--workspaces"),
        (["--workspaces", "16"], "--workspaces"),
        (["--workspaces", "256", "--gpus", "8"], "--gpus"),
        (["--gpus", "0"], "--gpus"),
        (["--gpus", "1025"], "--gpus"),
        (["--memory", "1e7"], "--memory"),
        (["--step-ms", "inf"], "--step-ms"),
        (["--limit", "0"], "--limit"),
        (["--out", "/dev/null/x"], "--out"),
        (["--memory", "nan"], "--memory"),
        (["--budget", "10"], "--max-requests"),
        (["--trace", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_bad_options_are_named(options, says, tmp_path):
    run = _replay("--limit", 20, "--out", tmp_path, *options)
    assert run.returncode == 2
    assert says in run.stderr
    assert "Traceback" not in run.stderr


def _replay(*options):
    command = [sys.executable, "-m", "experiments", "replay", *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


class TestCsv:
    def read(self, tmp_path, text):
        path = tmp_path / "trace.csv"
        path.write_text(text)
        return read_csv_trace(path)

    def test_seconds_and_dates(self, tmp_path):
        rows = self.read(tmp_path, "arrival,context_tokens,generated_tokens\n2.5,7,3\n1.5,4,0\n")
        assert [(r.timestamp, r.input_length, r.output_length) for r in rows] == [
            (0.0, 4, 1),
            (1000.0, 7, 3),
        ]
        text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.680,374,44\n"
        text += "2023-11-16 18:15:50.951,396,109\n"
        rows = self.read(tmp_path, text)
        assert rows[1].timestamp == pytest.approx(4271.0)
        assert rows[1].hash_ids == ()

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("", "no column"),
            ("a,b\n1,2\n", "no column of arrival"),
            ("arrival,context_tokens,generated_tokens\n", "no request"),
            ("arrival,context_tokens,generated_tokens\n1,x,2\n", "line 2"),
            ("arrival,context_tokens,generated_tokens\n1,3,2\nsoon,3,2\n", "line 3"),
            ("arrival,context_tokens,generated_tokens\nnan,3,2\n", "line 2"),
            ("arrival,context_tokens,generated_tokens\n1,0,2\n", "line 2"),
            ("arrival,context_tokens,generated_tokens\n1\n", "line 2: context_tokens is missing"),
            ("arrival,context_tokens,generated_tokens\n1,2,\n", "generated_tokens is missing"),
            ("arrival,context_tokens,generated_tokens\n-1,3,2\n", "expected seconds"),
            ("arrival,context_tokens,generated_tokens\n1,99999999,2\n", "1 to 16777216"),
            ("arrival,context_tokens,generated_tokens\n1,3,9999999\n", "0 to 1048576"),
            (
                "arrival,context_tokens,generated_tokens\n1,3,2\n2024-01-01 10:00:00,3,2\n",
                "line 3: a date after lines with seconds",
            ),
        ],
    )
    def test_malformed(self, tmp_path, text, says):
        with pytest.raises(TraceError, match=says):
            self.read(tmp_path, text)
