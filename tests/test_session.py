"""A session's rows, with answers in place of a worker's."""

import pytest

from experiments import compare as compare_module
from experiments.session import Problem, Session
from experiments.worker_process import TaskFailed, WorkerDied, WorkerHung
from sandbox.kernels import OPS


class ScriptedWorker:
    """Answers in place of a worker: checks pass; timing goes by a script of failures."""

    def __init__(self, *failures, wrong=(), cannot_make=None):
        self.failures = list(failures)
        self.wrong = wrong
        self.cannot_make = cannot_make
        self.timed = []

    def ask(self, task, on_stage=None, **arguments):
        if task == "check":
            if self.cannot_make:
                raise TaskFailed(self.cannot_make, None)
            return {"status": "PASSED", "message": "", "error": 0.0, "seconds": 0.1}
        if task == "time":
            self.timed.append(arguments["variants"])
            if self.failures:
                raise self.failures.pop(0)
            columns = {"samples_us": [1.0, 2.0], "launches": 8, "sets": 2, "l2": "cold"}
            columns |= {"method": "graph", "copy_us": 1.0}
            times = {v: columns for v in arguments["variants"] if v not in self.wrong}
            return {"timings": times, "wrong": dict.fromkeys(self.wrong, "row 3 differs")}
        return None

    def close(self):
        pass


def gpu_session(op, variants, **options):
    return Session(
        OPS[op],
        gpu=True,
        variants=[(name, "gpu") for name in variants],
        problems=[Problem(next(iter(OPS[op].cases("compare"))))],
        reproduce=lambda *row: "again",
        **options,
    )


def timed_rows(worker):
    steps = []
    made = gpu_session(
        "gather",
        ["raw_element", "raw_warp", "raw_tile"],
        on_progress=lambda done, text: steps.append(done),
    )
    made.worker = worker
    (rows,) = made.run()
    assert sum(steps) == made.steps
    return {row.variant: row for row in rows}


def checked_rows(worker, altered):
    case = next(iter(OPS["gather"].cases("compare")))
    made = Session(
        OPS["gather"],
        gpu=False,
        variants=[("raw_tile", "host")],
        problems=[Problem(case, altered=altered)],
        reproduce=lambda *row: "again",
    )
    made.worker = worker
    (rows,) = made.run()
    return rows


def test_variants_that_fail_when_timed_leave_the_others_their_times():
    worker = ScriptedWorker(
        WorkerDied("the process died (signal SIGABRT)", "raw_warp"),
        TaskFailed("CUDARuntimeError: misaligned address", "raw_element"),
    )
    rows = timed_rows(worker)
    assert worker.timed == [
        ["raw_element", "raw_warp", "raw_tile"],
        ["raw_element", "raw_tile"],
        ["raw_tile"],
    ]
    assert rows["raw_warp"].status == rows["raw_element"].status == "ERROR"
    assert "SIGABRT" in rows["raw_warp"].message
    assert "misaligned" in rows["raw_element"].message
    assert rows["raw_element"].median_us is None
    assert rows["raw_tile"].status == "PASSED"
    assert rows["raw_tile"].median_us == 1.5
    assert rows["raw_tile"].rank == 1


def test_a_variant_that_hangs_is_waited_for_once():
    asked = []

    class Hangs(ScriptedWorker):
        def ask(self, task, on_stage=None, **arguments):
            if task == "check":
                asked.append(arguments["variant"])
                if arguments["variant"] == "raw_warp":
                    raise WorkerHung("gave no answer for 300 s", "raw_warp")
            return super().ask(task, on_stage, **arguments)

    cases = [case for case, _ in zip(OPS["gather"].cases("compare"), range(3))]
    made = gpu_session("gather", ["raw_warp", "raw_tile"], timed=False)
    made.problems, made.worker = [Problem(case) for case in cases], Hangs()
    rows = [row for rows in made.run() for row in rows]
    assert asked == ["raw_warp", *["raw_tile"] * 3]
    hung = [(row.status, row.message) for row in rows if row.variant == "raw_warp"]
    later = ("ERROR", f"not run, as it hung on {cases[0].name}")
    assert hung == [("ERROR", "gave no answer for 300 s"), later, later]
    assert {row.status for row in rows if row.variant == "raw_tile"} == {"PASSED"}


def test_a_failure_of_nobody_in_particular_costs_the_times_only():
    rows = timed_rows(ScriptedWorker(TaskFailed("OutOfMemoryError", "copy")))
    assert {row.status for row in rows.values()} == {"PASSED"}
    assert {row.median_us for row in rows.values()} == {None}
    assert all("OutOfMemoryError" in row.note for row in rows.values())


def test_outputs_that_are_wrong_after_the_timed_loop_take_the_time_away():
    rows = timed_rows(ScriptedWorker(wrong=["raw_tile"]))
    assert rows["raw_tile"].status == "WRONG"
    assert "after the timed loop: row 3 differs" in rows["raw_tile"].message
    assert rows["raw_tile"].median_us is None
    assert rows["raw_warp"].median_us == 1.5


@pytest.mark.parametrize(
    ("answer", "expected"),
    [(800.0, 800.0), (TaskFailed("OutOfMemoryError", None), "not measured: OutOfMemoryError")],
)
def test_rows_are_compared_with_a_gemm_measured_before_them(monkeypatch, answer, expected):
    class Gemm(ScriptedWorker):
        asked = 0

        def __init__(self, *arguments):
            super().__init__()

        def ask(self, task, on_stage=None, **arguments):
            if task != "gemm":
                return super().ask(task, on_stage, **arguments)
            Gemm.asked += 1
            if isinstance(answer, Exception):
                raise answer
            return answer

    monkeypatch.setattr(compare_module, "WorkerProcess", Gemm)
    moves = gpu_session("gather", ["reference"])
    assert compare_module.gemm_ceiling([moves]) is None
    untimed = gpu_session("prefill_attention", ["reference"], timed=False)
    assert compare_module.gemm_ceiling([moves, untimed]) is None
    assert Gemm.asked == 0
    computes = gpu_session("prefill_attention", ["reference"])
    assert compare_module.gemm_ceiling([moves, computes, untimed]) == expected
    assert Gemm.asked == 1
    computes.worker = Gemm()
    ((row,),) = computes.run()
    assert row.median_us == 1.5
    assert row.gemm_tflop_per_s == (expected if isinstance(expected, float) else None)
    assert row.percent_of_gemm == (
        pytest.approx(row.flops / 1.5 / 800e4) if isinstance(expected, float) else None
    )


def test_a_case_that_cannot_be_made_is_unavailable_if_the_user_changed_it():
    for altered, status in ((True, "UNAVAILABLE"), (False, "ERROR")):
        (row,) = checked_rows(ScriptedWorker(cannot_make="MemoryError"), altered)
        assert row.status == status
        assert row.message == "no such case can be made: MemoryError"
