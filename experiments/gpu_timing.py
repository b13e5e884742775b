"""Timing on a GPU: CUDA-graph replays over rotating arrays, interleaved, behind queued work.

Only the calls of CuPy are here; the arithmetic is in `measure`.
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
from experiments.measure import VariantFailed
from sandbox import arrays
from sandbox.kernels import conformance
from sandbox.kernels.case import Case, normal
from sandbox.kernels.cuda import device_info
from sandbox.kernels.op import Op, Output, Variant

COPY = "copy"
EAGER_CALLS, EAGER_BATCHES = 40, 5
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


class Filler:
    """Work to queue in front of a start event, so that the host is ahead of the GPU by then.

    It is a copy of `BYTES` between two buffers that no contender uses.
    """

    BYTES = 128 << 20

    def __init__(self) -> None:
        self._buffers = cp.full((2, self.BYTES), 0x5A, cp.uint8)
        self._copy()
        self.us = elapsed_us(lambda: [self._copy() for _ in range(10)]) / 10

    def enqueue(self, least_us: float) -> None:
        for _ in range(1 + int(least_us / self.us)):
            self._copy()

    def _copy(self) -> None:
        copy_bytes(self._buffers[1], self._buffers[0])


def copy_bytes(target: Any, source: Any) -> None:
    """Queue a device-to-device copy on the current stream."""
    cp.cuda.runtime.memcpyAsync(
        target.data.ptr,
        source.data.ptr,
        source.nbytes,
        cp.cuda.runtime.memcpyDeviceToDevice,
        cp.cuda.get_current_stream().ptr,
    )


def elapsed_us(enqueue: Callable[[], Any]) -> float:
    """GPU time of the queued work, between two events; waits for it."""
    start, stop = cp.cuda.Event(), cp.cuda.Event()
    start.record()
    enqueue()
    stop.record()
    stop.synchronize()
    return cp.cuda.get_elapsed_time(start, stop) * 1e3


def host_us(call: Callable[[], Any]) -> float:
    """Host time of a call that only queues work."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


@contextmanager
def blamed(variant: str) -> Iterator[None]:
    """What goes wrong inside, the GPU's own faults included, is this variant's failure."""
    try:
        yield
        cp.cuda.get_current_stream().synchronize()
    except Exception as failure:
        raise VariantFailed(variant) from failure


class ArgumentSets:
    """`sets` guarded copies of a call's arrays: inputs for all variants, outputs for each."""

    def __init__(self, op: Op, arguments: dict[str, Any], variants: list[str], sets: int) -> None:
        self._op = op
        self._pristine = arguments
        written = {id(arguments[name]) for name in op.written(arguments)}
        arrays_of_call = {n: a for n, a in arguments.items() if hasattr(a, "strides")}
        self._own = {n: a for n, a in arrays_of_call.items() if id(a) in written}
        shared = {n: a for n, a in arrays_of_call.items() if id(a) not in written}
        self._guarded: dict[str, list[dict[str, conformance.Guarded]]] = {v: [] for v in variants}
        for _ in range(sets):
            inputs = conformance.guard(shared)
            for variant in variants:
                self._guarded[variant].append({**inputs, **conformance.guard(self._own)})

    @staticmethod
    def bytes_of_set(op: Op, arguments: dict[str, Any], variants: int) -> int:
        """Memory of one set."""
        own = {id(arguments[name]) for name in op.written(arguments)}
        found = {id(a): a.nbytes for a in arguments.values() if hasattr(a, "strides")}
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


def contender(variant: Variant, calls: Sequence[Callable[[], Any]]) -> Contender:
    """The variant as a graph, or as eager launches with a note where that fails."""
    for call in calls:  # compiles, loads and touches everything
        call()
    cp.cuda.get_current_stream().synchronize()
    launch_us = elapsed_us(lambda: [call() for call in calls]) / len(calls)
    try:
        return captured(variant.name, calls, measure.launches(len(calls), launch_us))
    except Exception as failure:
        why = str(failure).partition("\n")[0]
        cp.cuda.get_current_stream().synchronize()
        return eager(variant.name, calls, why)


def copy_contender(bytes_moved: int, sets: int) -> Contender:
    """Device-to-device copies that read and write `bytes_moved` in all, rotating as the rest."""
    half = max(16, bytes_moved // 2)
    noise = normal(cp, (half // 4 + 1,), np.dtype(np.float32), 0).view(cp.uint8)[:half]
    pairs = [(noise.copy(), cp.empty_like(noise)) for _ in range(sets)]
    calls = [lambda s=source, t=target: copy_bytes(t, s) for source, target in pairs]
    for call in calls:
        call()
    launch_us = elapsed_us(lambda: [call() for call in calls]) / sets
    made = captured(COPY, calls, measure.launches(sets, launch_us))
    made.keeps = (made.keeps, pairs)
    return made


def replay_in_turn(contenders: dict[str, Contender], budget_s: float, stage: Stage) -> None:
    """Fill the contenders' samples, a replay of each in every round."""
    filler = Filler()
    start, stop = cp.cuda.Event(), cp.cuda.Event()
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
                filler.enqueue(50.0 + 2 * each.host_us)
                start.record()
                each.enqueue()
                stop.record()
                stop.synchronize()
                us = cp.cuda.get_elapsed_time(start, stop) * 1e3 / each.launches
                each.samples_us.append(us)
        rounds += 1


def eager_launch_us(call: Callable[[], Any]) -> float:
    """Host time of a call of the op, over queues that are short enough never to be full."""
    samples = []
    for _ in range(EAGER_BATCHES):
        cp.cuda.get_current_stream().synchronize()
        samples.append(host_us(lambda: [call() for _ in range(EAGER_CALLS)]) / EAGER_CALLS)
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
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        try:
            return _time_case(op, variants, case, budget_s, stage)
        finally:
            cp.get_default_memory_pool().free_all_blocks()


def _time_case(
    op: Op, variants: list[Variant], case: Case, budget_s: float, stage: Stage
) -> dict[str, Any]:
    arguments = conformance.prepare(op, case, cp)
    replaced = op.contract(**arguments)
    scalars = {name: v for name, v in replaced.items() if not isinstance(v, Output)}
    expected = op.reference(**{**arguments, **scalars})
    moved = op.cost(case).bytes
    free = cp.cuda.runtime.memGetInfo()[0]
    of_set = ArgumentSets.bytes_of_set(op, arguments, len(variants)) + moved
    rotation = measure.rotation(moved, device_info().l2_bytes, max(1, free // 2 // of_set))
    names = [variant.name for variant in variants]
    sets = ArgumentSets(op, arguments, names, rotation.sets)
    stage(COPY)
    contenders = {COPY: copy_contender(moved, rotation.sets)}
    eager_us = {}
    for variant in variants:
        stage(variant.name)
        with blamed(variant.name):
            calls = sets.calls(variant)
            contenders[variant.name] = contender(variant, calls)
            eager_us[variant.name] = eager_launch_us(calls[0])
    sets.poison()
    replay_in_turn(contenders, budget_s, stage)
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


def gemm_tflops(n: int = 8192, repeats: int = 10) -> float:
    """TFLOP/s of a bf16 `n` x `n` x `n` product of random matrices with float32 sums, by cuBLAS."""
    from cupy.cuda import cublas

    a, b = (normal(cp, (n, n), arrays.bfloat16, seed) for seed in (0, 1))
    c = cp.empty_like(a)
    one, zero = np.ones((), np.float32), np.zeros((), np.float32)
    bf16, sums, method = (
        cp.cuda.runtime.CUDA_R_16BF,
        cublas.CUBLAS_COMPUTE_32F,
        cublas.CUBLAS_GEMM_DEFAULT,
    )
    handle = cp.cuda.device.get_cublas_handle()
    cublas.setStream(handle, cp.cuda.get_current_stream().ptr)
    cublas.setPointerMode(handle, cublas.CUBLAS_POINTER_MODE_HOST)

    def product() -> None:
        cublas.gemmEx(
            handle, cublas.CUBLAS_OP_N, cublas.CUBLAS_OP_N, n, n, n, one.ctypes.data,
            a.data.ptr, bf16, n, b.data.ptr, bf16, n, zero.ctypes.data,
            c.data.ptr, bf16, n, sums, method,
        )  # fmt: skip

    filler = Filler()
    for _ in range(3):
        product()
    samples = []
    for _ in range(repeats):
        filler.enqueue(50.0)
        samples.append(elapsed_us(product))
    return 2 * n**3 / measure.spread(samples).median / 1e6
