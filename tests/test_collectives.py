"""Collectives of context parallelism, alone and in process, on the CPU and on GPUs."""

from __future__ import annotations

import contextvars
import faulthandler
import queue
import threading
import time

import collective_checks
import numpy as np
import pytest
from collective_checks import CALLS, CHECKS, SHAPES, gpu_count
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox.arrays import DTYPES, bfloat16
from sandbox.layers import collectives
from sandbox.layers.collectives import Abandoned, Alone, InProcess


@pytest.fixture(autouse=True)
def ends_in_time():
    """A rank that waits for ever ends the tests, and shows where every thread stands."""
    faulthandler.dump_traceback_later(60, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_in_process_moves_and_adds_as_numpy_does(world_size):
    results = InProcess(world_size).run(collective_checks.check_all)
    assert len(results) == world_size


def test_alone_is_a_world_of_one():
    assert (Alone().rank, Alone().world_size) == (0, 1)
    assert [collective_checks.check_all(Alone())] == InProcess(1).run(collective_checks.check_all)


@settings(max_examples=30, deadline=None)
@given(
    world_size=st.integers(1, 4),
    calls=st.lists(st.tuples(st.sampled_from(CALLS), st.sampled_from(SHAPES)), max_size=6),
    seed=st.integers(0, 999),
)
def test_any_sequence_with_ranks_that_come_late(world_size, calls, seed):
    def rank_makes_its_calls(collective):
        delays = np.random.default_rng([seed, collective.rank]).uniform(0, 1e-3, len(calls))
        for step, ((name, dtype), shape) in enumerate(calls):
            time.sleep(delays[step])
            CHECKS[name](collective, shape, dtype, seed + step)
        return collective.rank

    assert InProcess(world_size).run(rank_makes_its_calls) == list(range(world_size))


def test_inputs_may_be_overwritten_at_once():
    def overwrites(collective):
        delays = np.random.default_rng(collective.rank)
        mine, out = np.empty((3, 5), np.float32), np.empty((3, 3, 5), np.float32)
        for step in range(20):
            mine[...] = 10 * step + collective.rank
            time.sleep(delays.uniform(0, 1e-3))
            collective.all_gather(mine, out)
            mine[...] = -1
            assert (out == 10 * step + np.arange(3)[:, None, None]).all()

    InProcess(3).run(overwrites)


def test_sums_are_rounded_once():
    """256 + 1 + 1 is 258; bfloat16, which has no 257, would stay at 256 on the way."""

    def add(collective):
        mine = np.full((3, 2), [256, 1, 1][collective.rank], bfloat16)
        out = np.empty(2, bfloat16)
        collective.reduce_scatter(mine, out)
        return out

    assert np.array_equal(InProcess(3).run(add), np.full((3, 2), 258, bfloat16))


def test_sums_that_are_too_large():
    def add(collective, value, dtype):
        out = np.empty(1, dtype)
        collective.reduce_scatter(np.full((2, 1), value, dtype), out)
        return out[0]

    world = InProcess(2)
    assert world.run(lambda rank: add(rank, 40000, np.float16)) == [np.inf] * 2
    assert world.run(lambda rank: add(rank, 2**30, np.int32)) == [-(2**31)] * 2
    assert np.isnan(world.run(lambda rank: add(rank, [np.inf, -np.inf][rank.rank], "f4"))).all()


class LateQueue:
    """A thread's own queue, as a stream is: calls return at once, work follows in order, late."""

    here = threading.local()

    def __init__(self, seed: int) -> None:
        self.delays = np.random.default_rng(seed)
        self.work = queue.SimpleQueue()
        self.worker = threading.Thread(target=self.run, daemon=True)
        self.worker.start()
        LateQueue.here.queue = self

    def run(self) -> None:
        while (call := self.work.get()) is not None:
            time.sleep(self.delays.choice([0, 2e-3], p=[0.8, 0.2]))
            call()

    def copy(self, source, out) -> None:
        self.work.put(lambda: np.copyto(out, source))

    def mark(self) -> threading.Event:
        event = threading.Event()
        self.work.put(event.set)
        return event

    def wait(self, mark: threading.Event) -> None:
        self.work.put(mark.wait)

    def finish(self) -> None:
        self.work.put(None)
        self.worker.join(20)
        assert not self.worker.is_alive()


@pytest.mark.parametrize("call", ["all_gather", "all_to_all"])
def test_streams_wait_for_each_other(call, monkeypatch):
    """Queues that run late stand for streams: a missing wait shows in what is read."""
    monkeypatch.setattr(collectives, "queue_of", lambda array: LateQueue.here.queue)
    steps, world_size = 12, 3

    def steps_without_waiting(collective):
        late = LateQueue(seed=collective.rank)
        rank, shape = collective.rank, (world_size, 4)
        mine = np.full(shape if call == "all_to_all" else shape[1:], -1.0)
        outs = np.full((steps, *shape), np.nan)
        for step in range(steps):
            late.copy(np.float64(10 * step + rank), mine)
            getattr(collective, call)(mine, outs[step])
            late.copy(np.float64(-1), mine)
        late.finish()
        return outs

    want = 10 * np.arange(steps)[:, None, None] + np.arange(world_size)[:, None]
    for outs in InProcess(world_size).run(steps_without_waiting):
        assert np.array_equal(outs, np.broadcast_to(want, outs.shape))


@pytest.mark.parametrize("when", ["before", "between", "in place of the last"])
def test_an_error_in_one_rank_frees_the_others(when):
    abandoned = []

    def fails(collective):
        mine, out = np.ones(4), np.empty((3, 4))
        if collective.rank == 1 and when == "before":
            raise KeyError("mine")
        collective.all_gather(mine, out)
        if collective.rank == 1 and when == "between":
            raise KeyError("mine")
        collective.all_gather(mine, out)
        if collective.rank == 1:
            raise KeyError("mine")
        try:
            collective.all_gather(mine, out)
        except Abandoned as error:
            abandoned.append(str(error))
            raise

    with pytest.raises(KeyError, match="mine"):
        InProcess(3).run(fails)
    if when == "in place of the last":
        assert len(abandoned) == 2
        assert all("rank 1 has raised KeyError: 'mine'" in message for message in abandoned)


def test_a_rank_that_returns_early_frees_the_others():
    def leaves(collective):
        if collective.rank == 0:
            collective.all_gather(np.ones(4), np.empty((2, 4)))

    message = r"rank 0 waits in all_gather of float64 \(4,\) on the CPU, but rank 1 has returned"
    with pytest.raises(Abandoned, match=message):
        InProcess(2).run(leaves)


def test_a_ranks_own_error_goes_before_that_of_one_left_alone():
    left_alone = threading.Event()

    def differ(collective):
        if collective.rank == 1:
            try:
                collective.all_gather(np.ones(4), np.empty((3, 4)))
            finally:
                left_alone.set()
        if collective.rank == 2:
            left_alone.wait(20)
            time.sleep(0.01)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        InProcess(3).run(differ)


def test_a_rank_with_a_bad_argument_says_so():
    def gives_less(collective):
        out = np.empty((2, 4) if collective.rank == 0 else (2, 3))
        collective.all_gather(np.ones(4), out)

    with pytest.raises(ValueError, match=r"out has shape \(2, 3\), expected \(2, 4\)"):
        InProcess(2).run(gives_less)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("all_gather", (2, 4), "float32"), ("all_to_all", (2, 4), "float32")),
        (("all_to_all", (2, 4), "float32"), ("reduce_scatter", (2, 4), "float32")),
        (("all_gather", (4,), "float32"), ("all_gather", (5,), "float32")),
        (("all_gather", (4, 1), "float32"), ("all_gather", (1, 4), "float32")),
        (("all_gather", (4,), "float16"), ("all_gather", (4,), "bfloat16")),
        (("all_to_all", (2, 0), "float32"), ("all_to_all", (2, 0, 3), "float32")),
    ],
)
def test_different_calls_are_told_to_all(first, second):
    told = []

    def differ(collective):
        name, shape, dtype = first if collective.rank == 0 else second
        array = np.ones(shape, DTYPES[dtype])
        out = np.empty(
            {"all_gather": (2, *shape), "all_to_all": shape, "reduce_scatter": shape[1:]}[name],
            array.dtype,
        )
        try:
            getattr(collective, name)(array, out)
        except ValueError as error:
            told.append(str(error))
        collective.all_gather(np.ones(1), np.empty((2, 1)))  # the world has not broken

    InProcess(2).run(differ)
    listed = [
        f"rank {rank}: {name} of {dtype} {shape} on the CPU"
        for rank, (name, shape, dtype) in enumerate([first, second])
    ]
    assert told == [f"the ranks make different calls: {'; '.join(listed)}"] * 2


def test_one_call_more_is_an_error():
    def one_more(collective):
        for _ in range(2 + collective.rank):
            collective.all_gather(np.ones(1), np.empty((3, 1)))

    with pytest.raises(Abandoned, match="rank 0 has returned"):
        InProcess(3).run(one_more)


def test_a_world_runs_again_after_an_error():
    world = InProcess(2)
    with pytest.raises(ZeroDivisionError):
        world.run(lambda collective: 1 // collective.rank)
    assert world.run(lambda collective: collective.rank) == [0, 1]


def test_ranks_for_threads_of_the_callers_own():
    world = InProcess(2)
    ranks = [world.rank(0), world.rank(1)]
    other = threading.Thread(target=collective_checks.check_all, args=(ranks[1],))
    other.start()
    collective_checks.check_all(ranks[0])
    other.join(20)
    assert not other.is_alive()
    with pytest.raises(ValueError, match="rank is 2, expected 0 to 1"):
        world.rank(2)


def test_a_rank_is_one_thread():
    world = InProcess(2)
    call = (np.ones(1), np.empty((2, 1)))
    waiting = threading.Thread(target=world.rank(0).all_gather, args=call)
    waiting.start()
    deadline = time.monotonic() + 20
    while not world._meetings._here and time.monotonic() < deadline:
        time.sleep(1e-4)
    with pytest.raises(RuntimeError, match=r"rank 0 is in all_gather .*, in another thread"):
        world.rank(0).all_gather(*call)
    world.rank(1).all_gather(np.ones(1), np.empty((2, 1)))
    waiting.join(20)
    assert not waiting.is_alive()


def test_threads_see_the_callers_context():
    variable = contextvars.ContextVar("variable", default="none")
    variable.set("the caller's")
    with np.errstate(divide="ignore"):
        seen = InProcess(2).run(lambda collective: (variable.get(), np.geterr()["divide"]))
    assert seen == [("the caller's", "ignore")] * 2


@pytest.mark.parametrize(
    ("call", "array", "out", "error", "message"),
    [
        ("all_gather", [1.0], np.ones((1, 1)), TypeError, "array is list, expected a NumPy or"),
        ("all_gather", np.float32(1), np.ones(1, "f4"), TypeError, "array is float32, expected"),
        ("all_gather", np.ones(3), None, TypeError, "out is NoneType, expected a NumPy or CuPy"),
        ("all_gather", np.ones((3, 2)).T, np.ones((1, 2, 3)), ValueError, "array has shape .*cont"),
        ("all_gather", np.ones(3), np.ones((1, 6))[:, ::2], ValueError, "out has shape .*contig"),
        ("all_gather", np.ones(3), np.ones(3), ValueError, r"out has shape \(3,\), .* \(1, 3\)"),
        ("all_gather", np.ones(3), np.ones((1, 3), "f4"), TypeError, "out is float32, .* array"),
        ("all_to_all", np.ones(()), np.ones(()), ValueError, r"array has shape \(\), expected 1"),
        ("all_to_all", np.ones((2, 3)), np.ones((2, 3)), ValueError, "expected 1 on axis 0"),
        ("all_to_all", np.ones((1, 3)), np.ones(3), ValueError, r"out has shape .* \(1, 3\)"),
        ("reduce_scatter", np.ones((2, 3)), np.ones(3), ValueError, "array has shape .* axis 0"),
        ("reduce_scatter", np.ones((1, 3)), np.ones((1, 3)), ValueError, r"expected \(3,\)"),
        ("reduce_scatter", np.ones((1, 3), "u1"), np.ones(3, "u1"), TypeError, "array is uint8"),
        ("reduce_scatter", np.ones((1, 3), "?"), np.ones(3, "?"), TypeError, "array is bool"),
    ],
)
def test_refusals_name_the_argument(call, array, out, error, message):
    before = None if out is None else out.copy()
    with pytest.raises(error, match=message):
        getattr(Alone(), call)(array, out)
    assert out is None or np.array_equal(out, before)


def test_outputs_that_cannot_be_written_are_refused():
    memory = np.ones((2, 3))
    for array, out in (memory[0], memory[:1]), (memory[0], memory.reshape(-1)[1:4].reshape(1, 3)):
        with pytest.raises(ValueError, match="out shares memory with array"):
            Alone().all_gather(array, out)
    out = np.ones((1, 3))
    out.flags.writeable = False
    with pytest.raises(ValueError, match="out: the array is read-only"):
        Alone().all_gather(memory[0], out)


@pytest.mark.parametrize(
    ("world_size", "error"),
    [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)],
)
def test_worlds_that_are_none(world_size, error):
    with pytest.raises(error, match="world_size is"):
        InProcess(world_size)


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_in_process_on_gpus(world_size):
    import cupy

    on_cpu = InProcess(world_size).run(collective_checks.check_all)

    def on_gpus(collective):
        gpu = cupy.cuda.Device(collective.rank % gpu_count())
        with gpu, cupy.cuda.Stream(non_blocking=True):
            return collective_checks.check_all(collective, cupy)

    def on_the_callers_stream(collective):
        assert cupy.cuda.get_current_stream() == stream
        return collective_checks.check_all(collective, cupy)

    assert InProcess(world_size).run(on_gpus) == on_cpu
    with cupy.cuda.Stream(non_blocking=True) as stream:
        assert InProcess(world_size).run(on_the_callers_stream) == on_cpu


@pytest.mark.gpu
@pytest.mark.parametrize("gpus", [1, 2])
def test_streams_of_gpus_wait_for_each_other(gpus):
    if gpu_count() < gpus:
        pytest.skip(f"{gpu_count()} CUDA devices; this needs {gpus}")
    import cupy

    def on_its_stream(collective):
        with cupy.cuda.Device(collective.rank % gpus), cupy.cuda.Stream(non_blocking=True):
            collective_checks.check_later_work(collective, cupy)

    InProcess(3).run(on_its_stream)


@pytest.mark.gpu
def test_arrays_of_another_device_than_the_current_one():
    if gpu_count() < 2:
        pytest.skip("one CUDA device; this needs two")
    import cupy

    with cupy.cuda.Device(1):
        array, out = cupy.zeros(3), cupy.zeros((1, 3))
    with pytest.raises(ValueError, match="array is on cuda:1, expected the current device, cuda:0"):
        Alone().all_gather(array, out)
