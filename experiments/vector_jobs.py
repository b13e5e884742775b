"""What is to be checked against conformance vectors, and what came of it."""

from __future__ import annotations

import queue
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from experiments.results import FAILURES
from experiments.vector_checks import CALLS, Verdict, judge, sample
from experiments.worker_process import TaskFailed, WorkerDied, WorkerProcess, environment_for
from sandbox.cache_formats import FORMATS
from sandbox.cache_formats.vectors import Vectors, load
from sandbox.kernels.op import Op


@dataclass(frozen=True)
class Finding:
    """One set of vectors through one writer or reader, of which `rows` were checked."""

    role: str
    name: str
    variant: str
    target: str
    cache_format: str
    vectors: str
    rows: int
    status: str
    message: str
    mismatch: dict[str, Any]
    reproduce: str

    @property
    def failed(self) -> bool:
        return self.status in FAILURES


@dataclass(frozen=True, eq=False)
class Job:
    """One writer or reader and the vectors of one format.

    Attributes:
        role: "writer" or "reader".
        name: an op, or the place of the user's function.
        variant, target: of the op.
        call: the user's function; None is the op, which a worker runs.
        options: what else the command needs to run it again.
        tile_scale: the rule that a writer is asked for.
    """

    role: str
    name: str
    variant: str = ""
    target: str = ""
    call: Callable[[Vectors], Any] | None = None
    options: tuple[str, ...] = ()
    cache_format: str = ""
    tile_scale: str | None = None
    vectors: tuple[Vectors, ...] = ()
    findings: list[Finding] = field(default_factory=list)

    def of_format(self, cache_format: str, rule: str | None) -> Iterator[Job]:
        """The jobs for one format: a writer's for each rule of tiles, or for the one given."""
        if self.name == "dequantize_context" and not FORMATS[cache_format].packed:
            return
        own = [each for each in load() if each.cache_format == cache_format]
        if self.role == "reader":
            kept = [each for each in own if each.tile_scale in (None, rule or each.tile_scale)]
            yield self._with(cache_format, None, kept)
            return
        rules = FORMATS[cache_format].tile_scales or (None,)
        for each in rules if rule not in rules else (rule,):
            kept = [v for v in own if v.rows is not None and v.tile_scale == each]
            yield self._with(cache_format, each, kept)

    def _with(self, cache_format: str, rule: str | None, vectors: Sequence[Vectors]) -> Job:
        given = {"cache_format": cache_format, "tile_scale": rule, "vectors": tuple(vectors)}
        return replace(self, **given, findings=[])

    @property
    def status(self) -> str:
        """The worst that was found; UNAVAILABLE only where nothing was checked."""
        found = {finding.status for finding in self.findings}
        order = ("ERROR", "WRONG", "PASSED", "UNAVAILABLE")
        return next((status for status in order if status in found), "UNAVAILABLE")

    @property
    def title(self) -> str:
        """The op or the user's function, and what it does."""
        return f"{self.name} ({self.role})"

    @property
    def place(self) -> str:
        """The user's function, or an op, its variant and where it runs."""
        if self.call:
            return f"{self.role} {self.name}"
        return f"{self.name} {self.variant} on {self.target}"

    @property
    def reproduce(self) -> str:
        """The command that runs this job alone."""
        words = ["python", "-m", "experiments", "conformance", "--format", self.cache_format]
        words += ["--tile-scale", self.tile_scale] if self.tile_scale else []
        if self.call:
            words += [f"--{self.role}", self.name]
        else:
            words += ["--op", self.name, "--variants", self.variant, "--target", self.target]
        return shlex.join([*words, *self.options])

    def run(self, worker: WorkerProcess) -> Job:
        """Fill in the findings; a worker that died is asked no more."""
        for vectors in self.vectors:
            some = sample(vectors, self.target)
            lost = False
            try:
                verdict = self._verdict(some, worker)
            except (WorkerDied, TaskFailed) as failure:
                verdict, lost = Verdict("ERROR", str(failure)), True
            place = (self.role, self.name, self.variant, self.target, self.cache_format)
            what = (vectors.label, len(some.stored), verdict.status, verdict.message)
            self.findings.append(Finding(*place, *what, verdict.mismatch, self.reproduce))
            if lost:
                break
        return self

    def _verdict(self, vectors: Vectors, worker: WorkerProcess) -> Verdict:
        if self.call:
            return judge(vectors, self.role == "writer", self.call)
        place = {"op": self.name, "variant": self.variant, "target": self.target}
        return Verdict(**worker.ask("vectors", **place, label=vectors.label))


def variant_jobs(
    ops: Sequence[Op],
    names: Mapping[str, Sequence[str]],
    targets: Sequence[str],
    variant_files: Sequence[Path],
) -> list[Job]:
    """A job without a format for every variant and each of its targets."""
    options = tuple(word for path in variant_files for word in ("--variant-file", str(path)))
    return [
        Job("writer" if CALLS[op.name][1] else "reader", op.name, name, target, options=options)
        for op in ops
        for name in names[op.name]
        for target in op.variants[name].targets
        if target in targets
    ]


def run_jobs(jobs: Sequence[Job], variant_files: Sequence[Path], timeout_s: float) -> Iterator[Job]:
    """Every job when it is done: two at a time without a GPU, and one on it or in this process."""
    for on_gpu in (False, True):
        own = [job for job in jobs if (job.target == "gpu") == on_gpu]
        alone = on_gpu or any(job.call for job in own)
        environment = environment_for(on_gpu)
        workers = [
            WorkerProcess(list(variant_files), environment, timeout_s)
            for _ in range(1 if alone else 2)
        ]
        idle: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()
        for worker in workers:
            idle.put(worker)

        def work(job: Job, idle: queue.SimpleQueue[WorkerProcess] = idle) -> Job:
            worker = idle.get()
            try:
                return job.run(worker)
            finally:
                idle.put(worker)

        pool = ThreadPoolExecutor(len(workers))
        try:
            yield from pool.map(work, own)
        finally:
            for worker in workers:
                worker.stop()
            pool.shutdown(cancel_futures=True)
            for worker in workers:
                worker.close()
