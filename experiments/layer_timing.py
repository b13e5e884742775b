"""Times of whole steps on a GPU: replays of a graph, interleaved, and of their stages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import cupy as cp

from experiments import gpu_timing, layer_bench, layer_cost, layer_stages, measure
from experiments.gpu_timing import COPY, blamed
from experiments.gpu_work import Filler, host_us, random_bytes
from experiments.layer_bench import Bench
from experiments.layer_contenders import LayerContender
from experiments.layer_problems import Problem
from sandbox.kernels import conformance
from sandbox.kernels.cuda import device_info

Stage = Callable[[str], None]
STAGE_ROUNDS = 7


def time_contenders(
    stage: Stage,
    problem: Problem,
    contenders: Sequence[str],
    budget_s: float,
    mode: str | None = None,
) -> dict[str, Any]:
    """Times of contenders that passed their check, and of a copy of the bytes of a step.

    Returns `timings` (columns of `results.Timing`), `stages` (of layers, microseconds by stage) and
    `wrong` (messages, for those whose outputs were not right after the timed loop), by contender.

    Raises:
        VariantFailed: one contender failed; the context may be lost.
    """
    held = layer_bench.bench(problem, True, mode)
    noise = random_bytes(measure.copy_bytes_for(layer_cost.step_cost(problem).bytes))
    held.wait()
    layer_bench.collect(True)
    with cp.cuda.Stream(non_blocking=True):
        return time_on_stream(held, contenders, noise, budget_s, stage)


def time_on_stream(
    held: Bench, contenders: Sequence[str], noise: Any, budget_s: float, stage: Stage
) -> dict[str, Any]:
    """As `time_contenders`, on the current stream, which is not the default one."""
    moved = layer_cost.step_cost(held.inputs.problem).bytes
    cold = moved > measure.COLD_FACTOR * device_info().l2_bytes
    stage(COPY)
    timed = {COPY: gpu_timing.copy_contender(noise, 1)}
    made, eager_us = {}, {}
    for name in contenders:
        stage(name)
        with blamed(name):
            made[name] = held.contender(name, stage)
            made[name].queue()
            eager_us[name] = gpu_timing.eager_launch_us(made[name].queue)
            timed[name] = gpu_timing.contender(
                name, [made[name].queue], made[name].capture, launches=1
            )
    held.inputs.forget_new_rows()
    for each in made.values():
        conformance.fill_poison(each.out)
    gpu_timing.replay_in_turn(timed, not cold, budget_s, stage)
    judged = {name: held.judge(each) for name, each in made.items()}
    passed = [name for name, outcome in judged.items() if outcome.status == "PASSED"]
    stages = {}
    for name in passed:
        if isinstance(made[name], LayerContender):
            stage(name)
            with blamed(name):
                stages[name] = stage_times(made[name])
    copy_us = measure.spread(timed[COPY].samples_us).median
    timings = {
        name: {
            "samples_us": timed[name].samples_us,
            "launches": timed[name].launches,
            "sets": 1,
            "l2": "cold" if cold else "warm",
            "method": timed[name].method,
            "copy_us": copy_us,
            "eager_launch_us": eager_us[name],
            "note": timed[name].note,
        }
        for name in passed
    }
    wrong = {n: outcome.message for n, outcome in judged.items() if outcome.status != "PASSED"}
    return {"timings": timings, "stages": stages, "wrong": wrong}


def stage_times(made: LayerContender) -> dict[str, float]:
    """GPU time by stage in microseconds, the median of some eager steps.

    The steps are queued behind other work, so that no event waits for the host. All is on one
    stream: what a step would compute beside the rest comes one after the other here.
    """
    layer, stream = made.layer, cp.cuda.get_current_stream()
    marks: list[tuple[str, Any]] = []

    def mark(name: str) -> None:
        event = cp.cuda.Event()
        event.record(stream)
        marks.append((name, event))

    def step() -> None:
        marks.clear()
        made.queue()
        mark("end")

    overlapped, layer.overlap_tokens = layer.overlap_tokens, 0
    layer.on_stage = mark
    try:
        step()
        stream.synchronize()
        filler, ahead_us = Filler(), 50.0 + 3 * host_us(step)
        rounds = []
        for _ in range(STAGE_ROUNDS):
            filler.enqueue(ahead_us)
            step()
            stream.synchronize()
            spans = [
                (name, cp.cuda.get_elapsed_time(event, after) * 1e3)
                for (name, event), (_, after) in itertools.pairwise(marks)
            ]
            rounds.append(layer_stages.by_stage(spans))
        return layer_stages.medians(rounds)
    finally:
        layer.on_stage, layer.overlap_tokens = None, overlapped
