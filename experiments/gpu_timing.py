"""Timing on a GPU: CUDA-graph replays over rotating arrays, interleaved, behind queued work.

The arithmetic is in `measure`, what is queued beside the variants in `gpu_work`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import cupy as cp
import numpy as np

from experiments import measure
from experiments.gpu_work import Filler, copy_bytes, elapsed_us, host_us, random_bytes
from experiments.measure import VariantFailed
from sandbox import arrays
from sandbox.kernels import conformance
from sandbox.kernels.case import Case
from sandbox.kernels.cuda import device_info
from sandbox.kernels.op import Op, Variant

COPY = "copy"
EAGER_CALLS, EAGER_BATCHES, EAGER_BATCH_US = 40, 5, 50_000.0
JUDGED_SETS = 16
Stage = Callable[[str], None]


@dataclass
class Contender:
    """Something to time: `enqueue()` queues `launches` launches on the current stream.

    `host_us` is how long that takes the host; `keeps` holds what the launches use.
    """

    name: str
    enqueue: Callable[[], None]
    launches: int
    method: str
    host_us: float = 0.0
    note: str = ""
    keeps: Any = None
    samples_us: list[float] = field(default_factory=list)


@contextmanager
def blamed(variant: str) -> Iterator[None]:
    """What goes wrong inside, the GPU's own faults included, is this variant's failure."""
    try:
        yield
        cp.cuda.get_current_stream().synchronize()
    except Exception as failure:
        raise VariantFailed(variant) from failure


class ArgumentSets:
    """`sets` guarded copies of a call's arrays: inputs for all variants, outputs for each.

    `in_place` says that an input is written, so that a second call finds other values.
    """

    def __init__(self, op: Op, arguments: dict[str, Any], variants: list[str], sets: int) -> None:
        self._op = op
        self._pristine = arguments
        written = {id(arguments[name]) for name in op.written(arguments)}
        arrays_of_call = {n: a for n, a in arguments.items() if arrays.is_array(a)}
        self._own = {n: a for n, a in arrays_of_call.items() if id(a) in written}
        shared = {n: a for n, a in arrays_of_call.items() if id(a) not in written}
        self.in_place = any(name not in op.written(arguments) for name in self._own)
        self._guarded: dict[str, list[dict[str, conformance.Guarded]]] = {v: [] for v in variants}
        for _ in range(sets):
            inputs = conformance.guard(shared)
            for variant in variants:
                self._guarded[variant].append({**inputs, **conformance.guard(self._own)})

    @staticmethod
    def bytes_of_set(op: Op, arguments: dict[str, Any], variants: int) -> int:
        """Memory of one set."""
        own = {id(arguments[name]) for name in op.written(arguments)}
        found = {id(a): a.nbytes for a in arguments.values() if arrays.is_array(a)}
        return sum(size * (variants if key in own else 1) for key, size in found.items())

    def calls(self, variant: Variant) -> list[Callable[[], Any]]:
        """One call of the op for each set."""

        def call_on(guarded: dict[str, conformance.Guarded]) -> Callable[[], Any]:
            arguments = {
                name: guarded[name].array if name in guarded else value
                for name, value in self._pristine.items()
            }
            return lambda: self._op(**arguments, variant=variant, check_values=False)

        return [call_on(guarded) for guarded in self._guarded[variant.name]]

    def poison(self) -> None:
        """Every written array as before its first launch: outputs poisoned."""
        for sets in self._guarded.values():
            for guarded in sets:
                for name in self._own:
                    guarded[name].array[...] = self._pristine[name]

    def judge(self, variant: str, case: Case, expected: dict[str, Any]) -> conformance.Outcome:
        """The oracle's word on what the launches left, in up to `JUDGED_SETS` sets."""
        sets = self._guarded[variant]
        outcome = conformance.Outcome("PASSED")
        for index in sorted({*np.linspace(0, len(sets) - 1, JUDGED_SETS).astype(int).tolist()}):
            outcome = conformance.judge(self._op, case, self._pristine, sets[index], expected)
            if not outcome.passed:
                break
        return outcome


def captured(name: str, calls: Sequence[Callable[[], Any]], launches: int) -> Contender:
    """`launches` calls, in turn, as a CUDA graph; raises where they cannot be captured."""
    stream = cp.cuda.get_current_stream()
    pool = cp.cuda.MemoryPool()  # temporaries stay with the graph
    failure: Exception | None = None
    with cp.cuda.using_allocator(pool.malloc):
        stream.begin_capture()
        try:
            for index in range(launches):
                calls[index % len(calls)]()
        except Exception as error:
            failure = error
        try:
            graph = stream.end_capture()
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return Contender(name, lambda: graph.launch(stream), launches, "graph", keeps=(graph, pool))


def eager(name: str, calls: Sequence[Callable[[], Any]], why: str) -> Contender:
    """One call for each set, queued one by one."""

    def enqueue() -> None:
        for call in calls:
            call()

    note = f"eager launches, as it cannot be captured in a graph ({why})"
    return Contender(name, enqueue, len(calls), "eager", note=note)


def contender(
    name: str,
    calls: Sequence[Callable[[], Any]],
    capture: Callable[..., Contender] | None = None,
    launches: int | None = None,
) -> Contender:
    """`calls` as a graph of so many launches, or as eager launches with a note where that fails.

    None is as many launches as last about `measure.REPLAY_US`.
    """
    for call in calls:  # compiles, loads and touches everything
        call()
    cp.cuda.get_current_stream().synchronize()
    if launches is None:
        launch_us = elapsed_us(lambda: [call() for call in calls]) / len(calls)
        launches = measure.launches(len(calls), launch_us)
    try:
        return (capture or captured)(name, calls, launches)
    except Exception as failure:
        why = str(failure).partition("\n")[0]
        cp.cuda.get_current_stream().synchronize()
        return eager(name, calls, why)


def copy_contender(noise: Any, sets: int) -> Contender:
    """Device-to-device copies of the bytes of `noise`, rotating as the rest."""
    pairs = [(noise.copy(), cp.empty_like(noise)) for _ in range(sets)]
    calls = [lambda s=source, t=target: copy_bytes(t, s) for source, target in pairs]
    for call in calls:
        call()
    launch_us = elapsed_us(lambda: [call() for call in calls]) / sets
    made = captured(COPY, calls, measure.launches(sets, launch_us))
    made.keeps = (made.keeps, pairs)
    return made


def replay_in_turn(
    contenders: dict[str, Contender], warm: bool, budget_s: float, stage: Stage
) -> None:
    """Fill the contenders' samples, a replay of each in every round.

    The work ahead of a replay sweeps the L2 cache; where it should be `warm`, an untimed replay
    comes between.
    """
    filler = Filler()
    for each in contenders.values():
        stage(each.name)
        with blamed(each.name):
            each.enqueue()
            cp.cuda.get_current_stream().synchronize()
            each.host_us = host_us(each.enqueue)
    began, rounds = time.perf_counter(), 0
    while not measure.enough(rounds, time.perf_counter() - began, budget_s):
        for name in measure.order(list(contenders), rounds):
            each = contenders[name]
            with blamed(name):
                filler.enqueue(50.0 + 3 * each.host_us)
                if warm:
                    each.enqueue()
                each.samples_us.append(elapsed_us(each.enqueue) / each.launches)
        rounds += 1


def eager_launch_us(call: Callable[[], Any]) -> float:
    """Host time of a call of the op, over queues that are short enough never to be full.

    Calls that keep the GPU busy for long are fewer.
    """
    calls = min(EAGER_CALLS, 1 + int(EAGER_BATCH_US / max(1.0, elapsed_us(call))))
    samples = []
    for _ in range(EAGER_BATCHES):
        cp.cuda.get_current_stream().synchronize()
        samples.append(host_us(lambda: [call() for _ in range(calls)]) / calls)
    return measure.spread(samples).median


def time_case(
    op: Op, variants: list[Variant], case: Case, budget_s: float, stage: Stage
) -> dict[str, Any]:
    """Times of variants that passed their check, and of a copy of the same number of bytes.

    Returns `timings` (columns of `results.Timing` by variant) and `wrong` (messages by variant,
    for those whose outputs were not right after the timed loop).

    Raises:
        VariantFailed: one variant failed; the context may be lost.
    """
    arguments = conformance.prepare(op, case, cp)
    expected = op.reference(**conformance.checked_arguments(op, arguments))
    noise = random_bytes(measure.copy_bytes_for(op.cost(case).bytes))
    cp.cuda.runtime.deviceSynchronize()  # the stream below does not wait for the default one
    cp.get_default_memory_pool().free_all_blocks()
    with cp.cuda.Stream(non_blocking=True):
        return _time_prepared(op, variants, case, arguments, expected, noise, budget_s, stage)


def _time_prepared(
    op: Op,
    variants: list[Variant],
    case: Case,
    arguments: dict[str, Any],
    expected: dict[str, Any],
    noise: Any,
    budget_s: float,
    stage: Stage,
) -> dict[str, Any]:
    moved = op.cost(case).bytes
    free = cp.cuda.runtime.memGetInfo()[0]
    of_set = ArgumentSets.bytes_of_set(op, arguments, len(variants)) + moved
    rotation = measure.rotation(moved, device_info().l2_bytes, max(1, free // 2 // of_set))
    names = [variant.name for variant in variants]
    sets = ArgumentSets(op, arguments, names, rotation.sets)
    stage(COPY)
    contenders = {COPY: copy_contender(noise, rotation.sets)}
    calls, eager_us = {}, {}
    for variant in variants:
        stage(variant.name)
        with blamed(variant.name):
            calls[variant.name] = sets.calls(variant)
            contenders[variant.name] = contender(variant.name, calls[variant.name])
            eager_us[variant.name] = eager_launch_us(calls[variant.name][0])
    sets.poison()
    replay_in_turn(contenders, not rotation.cold, budget_s, stage)
    if sets.in_place:  # many calls on the same values are not what the oracle knows
        sets.poison()
        for name in names:
            with blamed(name):
                for call in calls[name]:
                    call()
    outcomes = {name: sets.judge(name, case, expected) for name in names}
    copy_us = measure.spread(contenders[COPY].samples_us).median
    timings = {
        name: {
            "samples_us": contenders[name].samples_us,
            "launches": contenders[name].launches,
            "sets": rotation.sets,
            "l2": rotation.l2,
            "method": contenders[name].method,
            "copy_us": copy_us,
            "eager_launch_us": eager_us[name],
            "note": contenders[name].note,
        }
        for name in names
        if outcomes[name].passed
    }
    wrong = {name: o.message for name, o in outcomes.items() if not o.passed}
    return {"timings": timings, "wrong": wrong}
