"""One op on one group of targets: check every variant on every case, time what passed on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from experiments.results import Row, Timing, describe, with_times
from experiments.worker_process import (
    TaskFailed,
    WorkerDied,
    WorkerHung,
    WorkerProcess,
    environment_for,
)
from sandbox.kernels.case import Case
from sandbox.kernels.op import Op

CPU_TARGETS = ("host", "sim", "cpu")


@dataclass(frozen=True)
class Problem:
    """A case and what was done to get it.

    `altered` says that the user's dims or dtype replaced the case's own, so that an op may have to
    turn it down.
    """

    case: Case
    scaled: str = ""
    altered: bool = False


@dataclass
class Session:
    """What one worker has to do.

    Attributes:
        variants: (variant name, target) pairs, all on the GPU or all off it.
        reproduce: the command that makes one row again, from a case name, variant and target.
        timed: whether variants that pass are timed.
        checked: whether the host runner checks every access, in a shuffled schedule.
        gemm_tflop_per_s: a large GEMM's rate in this run, which FLOPs are compared with.
        on_progress: called with steps done and words for what comes next.
    """

    op: Op
    gpu: bool
    variants: Sequence[tuple[str, str]]
    problems: Sequence[Problem]
    reproduce: Callable[[str, str, str], str]
    variant_files: Sequence[Path] = ()
    timed: bool = True
    checked: bool = False
    gemm_tflop_per_s: float | None = None
    budget_s: float = 0.5
    timeout_s: float = 300.0
    on_progress: Callable[[int, str], None] = lambda done, text: None
    worker: WorkerProcess = field(init=False)
    _hung: dict[tuple[str, str], str] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        environment = environment_for(self.gpu)
        self.worker = WorkerProcess(list(self.variant_files), environment, self.timeout_s)

    @property
    def title(self) -> str:
        return self.op.name

    @property
    def steps(self) -> int:
        """Steps that `on_progress` will count."""
        return len(self.problems) * (len(self.variants) + (self.gpu and self.timed))

    @property
    def needs_gemm(self) -> bool:
        """Whether times of it are compared with a GEMM's rate."""
        timed = self.gpu and self.timed
        return timed and any(self.op.cost(problem.case).flops for problem in self.problems)

    def run(self) -> Iterator[list[Row]]:
        """The rows of each case, as cases are finished."""
        try:
            self._build()
            for problem in self.problems:
                rows = [self._check(problem, name, target) for name, target in self.variants]
                if self.gpu and self.timed:
                    self.on_progress(0, f"timing {problem.case.name}")
                    rows = self._time(problem, rows)
                    self.on_progress(1, "")
                yield rows
        finally:
            self.worker.close()

    def stop(self) -> None:
        """End it from another thread; `run` then raises WorkerStopped."""
        self.worker.stop()

    def _build(self) -> None:
        self.on_progress(0, "compiling")
        affordable = [
            problem.case
            for problem in self.problems
            if any(problem.case.affordable(target) for _, target in self.variants)
        ]
        names = [name for name, _ in self.variants]
        try:
            self.worker.ask(
                "build",
                lambda stage: self.on_progress(0, stage),
                op=self.op.name,
                variants=names,
                cases=affordable,
                gpu=self.gpu,
                checked=self.checked,
            )
        except (WorkerDied, TaskFailed) as failure:
            self.on_progress(0, f"compiling ahead failed: {failure}")

    def _blank(self, problem: Problem, variant: str, target: str) -> Row:
        known = self.op.variants[variant]
        cost = self.op.cost(problem.case)
        return Row(
            op=self.op.name,
            variant=variant,
            kind=known.kind,
            target=target,
            baseline=known.baseline,
            scaled=problem.scaled,
            checked=self.checked and target == "host",
            bytes=cost.bytes,
            flops=cost.flops,
            reproduce=self.reproduce(problem.case.name, variant, target),
            **describe(problem.case),
        )

    def _check(self, problem: Problem, variant: str, target: str) -> Row:
        self.on_progress(0, f"{variant} {problem.case.name}")
        row = self._blank(problem, variant, target)
        if case := self._hung.get((variant, target)):
            self.on_progress(1, "")
            return replace(row, status="ERROR", message=f"not run, as it hung on {case}")
        try:
            answer = self.worker.ask(
                "check",
                op=self.op.name,
                variant=variant,
                case=problem.case,
                gpu=self.gpu,
                checked=row.checked,
            )
        except WorkerDied as failure:
            row = replace(row, status="ERROR", message=str(failure))
            if isinstance(failure, WorkerHung):
                self._hung[variant, target] = problem.case.name
        except TaskFailed as failure:
            status = "UNAVAILABLE" if problem.altered else "ERROR"
            row = replace(row, status=status, message=f"no such case can be made: {failure}")
        else:
            row = replace(
                row,
                status=answer["status"],
                message=answer["message"],
                error=_number(answer["error"]),
                check_host_seconds=answer["seconds"],
            )
        self.on_progress(1, "")
        return row

    def _time(self, problem: Problem, rows: list[Row]) -> list[Row]:
        def ask(variants: list[str]) -> dict[str, Any]:
            return self.worker.ask(
                "time",
                lambda stage: self.on_progress(0, f"timing {stage} {problem.case.name}"),
                op=self.op.name,
                variants=variants,
                case=problem.case,
                budget_s=self.budget_s,
            )

        rows, answer = time_passed(rows, ask)
        timings = {name: Timing(**columns) for name, columns in answer["timings"].items()}
        return with_times(rows, timings, self.gemm_tflop_per_s)


def time_passed(
    rows: Sequence[Row], ask: Callable[[list[str]], dict[str, Any]]
) -> tuple[list[Row], dict[str, Any]]:
    """The rows of one case, and what `ask` says of the times of those that passed.

    A variant that fails now is an ERROR, and `ask` is asked again without it; one whose results are
    not right any more is WRONG.
    """
    by_variant = {row.variant: row for row in rows}
    answer: dict[str, Any] = {"timings": {}}
    while waiting := [
        row.variant for row in by_variant.values() if row.status == "PASSED" and not row.note
    ]:
        try:
            answer = ask(waiting)
        except (WorkerDied, TaskFailed) as failure:
            blamed = failure.stage if isinstance(failure, WorkerDied) else failure.variant
            _blame(by_variant, waiting, blamed, str(failure))
            continue
        for variant, message in answer["wrong"].items():
            by_variant[variant] = replace(
                by_variant[variant], status="WRONG", message=f"after the timed loop: {message}"
            )
        break
    return list(by_variant.values()), answer


def _blame(rows: dict[str, Row], waiting: list[str], variant: str | None, message: str) -> None:
    if variant in waiting:
        rows[variant] = replace(rows[variant], status="ERROR", message=f"when timed: {message}")
        return
    for name in waiting:
        rows[name] = replace(rows[name], note=f"not timed: {message}")


def _number(value: float | str | None) -> float | None:
    return float(value) if value is not None else None


def group_variants(op: Op, names: Sequence[str], targets: Sequence[str]) -> Mapping[bool, Any]:
    """(variant, target) pairs for the wanted targets, by whether they run on the GPU."""
    groups: dict[bool, list[tuple[str, str]]] = {True: [], False: []}
    for name in names:
        for target in op.variants[name].targets:
            if target in targets:
                groups[target == "gpu"].append((name, target))
    return groups
