"""All problems of a run, one after the other in a worker: check every contender, then time them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from experiments import layer_rows
from experiments.layer_problems import Problem
from experiments.layer_rows import LayerRow
from experiments.session import time_passed
from experiments.worker_process import TaskFailed, WorkerDied, WorkerProcess, environment_for

JUDGED = ("status", "message", "rms_error", "max_error", "one_minus_cosine")
MEASURED = ("workspace_bytes", "peak_bytes")


@dataclass
class LayerSession:
    """What one worker has to do; it is run as a `session.Session` is.

    Attributes:
        work: problems with the names of their contenders.
        reproduce: the command that makes one row again.
        mode: of `torch.compile`.
        budget_s: seconds of replays a problem.
    """

    gpu: bool
    work: Sequence[tuple[Problem, Sequence[str]]]
    reproduce: Callable[[Problem, str], str]
    variant_files: Sequence[Path] = ()
    mode: str | None = None
    budget_s: float = 0.5
    timeout_s: float = 300.0
    gemm_tflop_per_s: float | None = None
    on_progress: Callable[[int, str], None] = lambda done, text: None
    worker: WorkerProcess = field(init=False)

    def __post_init__(self) -> None:
        environment = environment_for(self.gpu)
        self.worker = WorkerProcess(list(self.variant_files), environment, self.timeout_s)

    @property
    def title(self) -> str:
        return "layer"

    @property
    def steps(self) -> int:
        return sum(len(names) + self.gpu for _, names in self.work)

    @property
    def needs_gemm(self) -> bool:
        return self.gpu

    def run(self) -> Iterator[list[LayerRow]]:
        """The rows of each problem, as problems are finished."""
        try:
            for problem, names in self.work:
                rows, notes = [], {}
                for name in names:
                    row, notes[name] = self._check(problem, name)
                    rows.append(row)
                if self.gpu:
                    rows = self._time(problem, rows)
                    self.on_progress(1, "")
                yield [_noted(row, notes[row.variant]) for row in rows]
        finally:
            self.worker.close()

    def stop(self) -> None:
        """End it from another thread; `run` then raises WorkerStopped."""
        self.worker.stop()

    def _ask(self, task: str, problem: Problem, doing: str, **arguments: Any) -> dict[str, Any]:
        return self.worker.ask(
            task,
            lambda stage: self.on_progress(0, f"{doing}{stage} {problem.name}"),
            problem=problem,
            mode=self.mode,
            **arguments,
        )

    def _check(self, problem: Problem, contender: str) -> tuple[LayerRow, str]:
        """The contender's row without times, and what is to be known of it."""
        row = layer_rows.blank(problem, contender, self.gpu, self.reproduce(problem, contender))
        self.on_progress(0, f"{contender} {problem.name}")
        note = ""
        try:
            answer = self._ask("check_layer", problem, "", contender=contender, gpu=self.gpu)
        except (WorkerDied, TaskFailed) as failure:
            row = replace(row, status="ERROR", message=str(failure))
        else:
            note = answer.get("note", "")
            row = replace(
                row,
                error=None if answer["error"] is None else float(answer["error"]),
                check_host_seconds=answer.get("seconds"),
                **{name: answer[name] for name in JUDGED},
                **{name: answer.get(name) for name in MEASURED},
            )
        self.on_progress(1, "")
        return row, note

    def _time(self, problem: Problem, rows: list[LayerRow]) -> list[LayerRow]:
        def ask(contenders: list[str]) -> dict[str, Any]:
            return self._ask(
                "time_layers", problem, "timing ", contenders=contenders, budget_s=self.budget_s
            )

        return layer_rows.timed(*time_passed(rows, ask), self.gemm_tflop_per_s)


def _noted(row: LayerRow, note: str) -> LayerRow:
    return replace(row, note="; ".join(filter(None, (note, row.note))))
