"""What a run leaves behind: rows as JSON Lines, with raw samples and how to reproduce each."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from experiments import measure
from sandbox.kernels.case import Case

STATUSES = ("PASSED", "WRONG", "ERROR", "UNAVAILABLE")
FAILURES = ("WRONG", "ERROR")


@dataclass(frozen=True)
class Timing:
    """GPU times of one variant on one case, in microseconds a launch.

    `method` is "graph" (replays of a captured CUDA graph) or "eager" (launches queued behind other
    work); `launches` is per sample, rotating over `sets` copies of the arrays. `l2` says whether
    they were "cold" by the rule of `measure.rotation`. `eager_launch_us` is host time a call.
    """

    samples_us: tuple[float, ...]
    launches: int
    sets: int
    l2: str
    method: str
    copy_us: float | None = None
    eager_launch_us: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Row:
    """One variant on one case on one target. Times are None unless it PASSED on a GPU.

    `checked` says that the host runner ran its checked build in a shuffled schedule. `limit_us` and
    `limit_by` are `measure.limit` by the copy and the GEMM of the run; they are None where one was
    not measured that they need.
    """

    op: str
    variant: str
    kind: str
    target: str
    baseline: bool
    case: str
    dims_name: str
    dims: Mapping[str, Any]
    dtype: str
    options: Mapping[str, Any]
    workload: Mapping[str, Any]
    scaled: str
    size: str
    seed: int
    bytes: int
    flops: int
    reproduce: str
    checked: bool = False
    status: str = ""
    message: str = ""
    error: float | None = None
    check_host_seconds: float | None = None
    median_us: float | None = None
    q25_us: float | None = None
    q75_us: float | None = None
    gb_per_s: float | None = None
    tflop_per_s: float | None = None
    percent_of_gemm: float | None = None
    gemm_tflop_per_s: float | None = None
    percent_of_copy: float | None = None
    copy_ratio: float | None = None
    copy_us: float | None = None
    limit_us: float | None = None
    limit_by: str | None = None
    percent_of_limit: float | None = None
    speedup: float | None = None
    rank: int | None = None
    eager_launch_us: float | None = None
    launches: int | None = None
    sets: int | None = None
    l2: str | None = None
    method: str | None = None
    note: str = ""
    samples_us: tuple[float, ...] = field(default=())

    @property
    def iqr_us(self) -> float | None:
        return None if self.median_us is None else self.q75_us - self.q25_us

    @property
    def failed(self) -> bool:
        return self.status in FAILURES

    @property
    def computes(self) -> bool:
        """Whether its FLOPs can matter: a GPU has more of them to spend than bytes."""
        return self.flops > self.bytes


COLUMNS = tuple(each.name for each in fields(Row))


def describe(case: Case) -> dict[str, Any]:
    """The columns of a row that a case fixes. Lengths are summed up, not copied."""
    work = case.workload
    return {
        "case": case.name,
        "dims_name": case.dims_name,
        "dims": asdict(case.dims),
        "dtype": case.dtype.name,
        "options": dict(case.options),
        "workload": {
            "name": work.name,
            "requests": len(work.context_lens),
            "context_tokens": work.context_tokens,
            "query_tokens": work.query_tokens,
            "longest_context": max(work.context_lens, default=0),
        },
        "size": case.size,
        "seed": case.seed,
    }


def with_times(
    rows: Iterable[Row], timings: Mapping[str, Timing], gemm_tflop_per_s: float | None = None
) -> list[Row]:
    """The rows of one case with their times, what follows from them and a GEMM's rate, and ranks.

    A row that has not PASSED on a GPU gets no time, whatever `timings` holds.
    """
    timed = []
    for row in rows:
        timing = timings.get(row.variant)
        if timing is not None and row.status == "PASSED" and row.target == "gpu":
            spread = measure.spread(timing.samples_us)
            columns = {name: getattr(timing, name) for name in Timing.__dataclass_fields__}
            row = replace(
                row,
                median_us=spread.median,
                q25_us=spread.q25,
                q75_us=spread.q75,
                **columns,
            )
        timed.append(row)
    baseline = next((row.median_us for row in timed if row.baseline and row.median_us), None)
    ranks = measure.ranks(asdict(row) for row in timed)
    return [
        replace(
            row,
            rank=ranks.get(row.variant),
            gemm_tflop_per_s=gemm_tflop_per_s,
            **measure.rates(
                row.median_us, row.copy_us, baseline, row.bytes, row.flops, gemm_tflop_per_s
            ),
        )
        if row.median_us is not None
        else row
        for row in timed
    ]


class Run:
    """The folder of one run; rows are written as they come, so that a broken run leaves them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.rows: list[Row] = []
        self._file = (folder / "rows.jsonl").open("w")

    def add(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self.rows.append(row)
            self._file.write(json.dumps(jsonable(asdict(row)), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def write_json(self, name: str, content: Any) -> None:
        text = json.dumps(jsonable(content), indent=2, allow_nan=False)
        (self.folder / name).write_text(text + "\n")


def run_folder(experiment: str, chosen: Path | None) -> Path:
    """`chosen`, or `results/<time>-<experiment>` in the current directory."""
    return chosen or Path("results") / f"{datetime.now():%Y%m%d-%H%M%S}-{experiment}"


def read_rows(folder: Path, of: type[Row] = Row) -> list[Row]:
    """The rows that a run wrote to `folder`; what an older one did not write yet is None."""
    lines = (folder / "rows.jsonl").read_text().splitlines()
    rows = []
    for line in lines:
        columns = json.loads(line)
        columns["samples_us"] = tuple(columns["samples_us"])
        if isinstance(columns["error"], str):
            columns["error"] = float(columns["error"])
        rows.append(of(**columns))
    return rows


def jsonable(value: Any) -> Any:
    """JSON has no infinity and no tuples: those become "inf", "nan" and lists."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, str | int | float):
        return value
    return str(value)
