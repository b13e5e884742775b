"""What a worker holds of one problem of a whole layer, and the check of its contenders."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from experiments import layer_contenders
from experiments.layer_check import Judgement, judge
from experiments.layer_contenders import LayerContender, TorchContender
from experiments.layer_oracle import expected
from experiments.layer_problems import Problem, make_inputs
from sandbox import arrays
from sandbox.dims import MLADims
from sandbox.kernels import Unavailable, conformance
from sandbox.kernels.cuda import record_launches
from sandbox.kernels.failures import described
from sandbox.layers import MLAWeights, Workspace, random_weights

Stage = Callable[[str], None]


class Bench:
    """A problem's inputs, what the oracle says of them, and the contenders made so far."""

    def __init__(self, problem: Problem, gpu: bool, mode: str | None = None) -> None:
        self.gpu, self.mode = gpu, mode
        xp = arrays.import_cupy() if gpu else np
        stored = _weights(problem.dims, problem.dtype, problem.gate, problem.seed, xp)
        self.weights = MLAWeights.load(stored, problem.dims, output_gate=problem.gate)
        self.inputs = make_inputs(problem, stored, xp)
        self.expected = expected(self.inputs)
        self.workspace = Workspace()
        self._made: dict[str, LayerContender | TorchContender] = {}

    def contender(self, name: str, stage: Stage) -> LayerContender | TorchContender:
        """Raises what `layer_contenders.make` and a first step raise."""
        if name not in self._made:
            made = layer_contenders.make(name, self.inputs, self.weights, self.workspace, self.mode)
            if self.gpu and isinstance(made, LayerContender):
                self._compile(made, stage)
            self._made[name] = made
        return self._made[name]

    def forget(self, name: str) -> None:
        self._made.pop(name, None)

    def run(self, made: LayerContender | TorchContender) -> None:
        """One step, whose writes are not there before; waits for it."""
        self.inputs.forget_new_rows()
        if isinstance(made, LayerContender):
            conformance.fill_poison(made.out)
        made.queue()
        self.wait()

    def judge(self, made: LayerContender | TorchContender) -> Judgement:
        return judge(self.inputs, made.out, self.expected, made.writes_cache)

    def wait(self) -> None:
        if self.gpu:
            self.inputs.xp.cuda.runtime.deviceSynchronize()

    def _compile(self, made: LayerContender, stage: Stage) -> None:
        """Compile the step's kernels in parallel; one that cannot be, its launch will report."""
        from experiments.worker import compile_ahead

        with record_launches() as launches:
            made.queue()
        compile_ahead(stage, launches, gpu=True)


@functools.lru_cache(maxsize=1)
def _weights(dims: MLADims, dtype: str, gate: bool, seed: int, xp: Any) -> Mapping[str, Any]:
    return random_weights(dims, dtype, output_gate=gate, seed=seed, xp=xp)


_held: dict[tuple[Any, ...], Bench] = {}


def bench(problem: Problem, gpu: bool, mode: str | None) -> Bench:
    """That of the problem; another one's memory is given back first."""
    key = problem, gpu, mode
    if key not in _held:
        _held.clear()
        collect(gpu)
        _held[key] = Bench(problem, gpu, mode)
    return _held[key]


def collect(gpu: bool) -> None:
    """Give back the GPU memory that nothing refers to; a CPU has plenty for one problem."""
    if gpu:
        gc.collect()
        layer_contenders.free_bytes()


def check(
    stage: Stage, problem: Problem, contender: str, gpu: bool, mode: str | None = None
) -> dict[str, Any]:
    """One contender's step against the oracle; `seconds` is host time for it, from the first call.

    Returns the columns of a row: of `Judgement`, `seconds`, `note`, `workspace_bytes`,
    `peak_bytes`.
    """
    stage(contender)
    held: Bench | None = None
    start = time.perf_counter()
    try:
        held = bench(problem, gpu, mode)
        start = time.perf_counter()
        made = held.contender(contender, stage)
        held.run(made)
        seconds = time.perf_counter() - start
        judged = held.judge(made)
        found = {**made.memory(), "note": made.note, "seconds": seconds}
    except Exception as failure:
        judged, found = _failed(failure), {}
    if judged.status != "PASSED" and held is not None:
        held.forget(contender)
    collect(gpu)
    return {**asdict(judged), **found}


def _failed(failure: Exception) -> Judgement:
    reason = str(failure).partition("\n")[0]
    if isinstance(failure, Unavailable):
        return Judgement("UNAVAILABLE", reason)
    if type(failure).__name__ == "OutOfMemoryError":  # CuPy's and torch's
        return Judgement("UNAVAILABLE", f"out of memory: {reason}")
    return Judgement("ERROR", described(failure).partition("\n")[0])
