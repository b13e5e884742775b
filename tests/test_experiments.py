"""The command line, the workers, what a run leaves behind."""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments import doctor, plan, results, tables
from experiments.__main__ import app
from experiments.plan import Planner, Selection
from experiments.results import COLUMNS, STATUSES, read_rows
from experiments.session import Problem, Session
from experiments.worker_process import TaskFailed, WorkerDied, WorkerProcess
from sandbox.dims import PRESETS
from sandbox.kernels import OPS
from sandbox.kernels.cuda import no_device_reason

ROOT = Path(__file__).resolve().parents[1]
CASE = "tiny-bfloat16-mixed-block_size=16"

PLANTED = '''
import ctypes, os, signal, time
from sandbox.kernels import OPS
gather = OPS["gather"]
right = gather.variants["reference"].run

@gather.variant("planted_right", kind="numpy", baseline=True)
def planted_right(**arguments):
    """Right."""
    print("a line on standard output")
    right(**arguments)

@gather.variant("planted_wrong", kind="numpy")
def planted_wrong(**arguments):
    """Leaves the last row out."""
    right(**arguments)
    arguments["out"][-1] = 0

@gather.variant("planted_crash", kind="numpy")
def planted_crash(**arguments):
    """Reads address 1."""
    ctypes.string_at(1)

@gather.variant("planted_exit", kind="numpy")
def planted_exit(**arguments):
    """Leaves."""
    os._exit(3)

@gather.variant("planted_raise", kind="numpy")
def planted_raise(**arguments):
    """Raises."""
    raise RuntimeError("planted")

@gather.variant("planted_refusal", kind="numpy", supports=lambda **arguments: "it is Monday")
def planted_refusal(**arguments):
    """Refuses."""

@gather.variant("planted_sleep", kind="numpy")
def planted_sleep(**arguments):
    """Hangs."""
    if os.environ.get("PLANTED_SLEEP"):
        time.sleep(600)
    right(**arguments)

@gather.variant("planted_last", kind="numpy")
def planted_last(**arguments):
    """Right, after all of those."""
    right(**arguments)
'''


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    path = tmp_path_factory.mktemp("planted") / "planted.py"
    path.write_text(PLANTED)
    return path


def command(*arguments, script=None):
    start = [sys.executable, *([script] if script else ["-m", "experiments"])]
    return subprocess.run(
        [*start, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "120"},
    )


@pytest.fixture(scope="module")
def planted_run(planted, tmp_path_factory):
    """A run of the planted variants over two cases."""
    folder = tmp_path_factory.mktemp("run")
    done = command(
        "compare", "gather", "--variant-file", planted, "--variants", "planted_*", "--target",
        "cpu", "--case", "tiny-", "--dtype", "bfloat16", "--quick", "--out", folder,
    )  # fmt: skip
    return done, folder


def test_a_crash_spoils_no_other_variant(planted_run):
    done, folder = planted_run
    rows = read_rows(folder)
    cases = {row.case for row in rows}
    statuses = {}
    for row in rows:
        statuses.setdefault(row.variant, []).append(row.status)
    assert statuses == {
        name: [status] * len(cases)
        for name, status in {
            "planted_right": "PASSED",
            "planted_wrong": "WRONG",
            "planted_crash": "ERROR",
            "planted_exit": "ERROR",
            "planted_raise": "ERROR",
            "planted_refusal": "UNAVAILABLE",
            "planted_sleep": "PASSED",
            "planted_last": "PASSED",
        }.items()
    }
    messages = {row.variant: row.message for row in rows}
    assert "SIGSEGV" in messages["planted_crash"]
    assert "exit code 3" in messages["planted_exit"]
    assert "RuntimeError: planted" in messages["planted_raise"]
    assert messages["planted_refusal"] == "it is Monday"
    assert "must match bit for bit" in messages["planted_wrong"]
    assert done.returncode == 1


def test_a_run_leaves_rows_tables_plots_and_a_report(planted_run):
    done, folder = planted_run
    assert {path.name for path in folder.iterdir()} == {
        "rows.jsonl",
        "fingerprint.json",
        "table.txt",
        "table.md",
        "report.html",
        "gather_correctness.png",
    }
    fingerprint = json.loads((folder / "fingerprint.json").read_text())
    assert fingerprint["command"][:4] == ["python", "-m", "experiments", "compare"]
    assert len(fingerprint["sources"]) == 16
    assert {"commit", "dirty", "gpu", "driver", "clocks", "packages", "date"} <= set(fingerprint)
    page = (folder / "report.html").read_text()
    assert "data:image/png;base64," in page
    assert "src=http" not in page.replace('"', "")
    assert "SIGSEGV" in page
    table, _, failures = done.stdout.partition("WRONG gather planted_wrong on cpu")
    assert max(map(len, table.splitlines())) <= 120
    assert "planted_last" in table
    assert f"--case {CASE} --variants planted_crash" in failures


def test_each_row_has_every_column_and_no_host_time_as_gpu_time(planted_run):
    _, folder = planted_run
    lines = (folder / "rows.jsonl").read_text().splitlines()
    for line in lines:
        found = json.loads(line)
        assert tuple(found) == COLUMNS
        assert found["status"] in STATUSES
        assert found["target"] == "cpu"
        assert found["median_us"] is None
        assert found["rank"] is None
        assert found["samples_us"] == []
        if found["status"] == "PASSED":
            assert found["check_host_seconds"] > 0
            assert found["error"] == 0.0
    assert "not a GPU time" in (folder / "table.txt").read_text()


def test_the_reproduce_command_makes_the_row_again(planted_run, tmp_path):
    _, folder = planted_run
    row = next(row for row in read_rows(folder) if row.variant == "planted_wrong")
    words = shlex.split(row.reproduce)
    assert words[:3] == ["python", "-m", "experiments"]
    again = command(*words[3:], "--out", tmp_path)
    assert again.returncode == 1
    (found,) = read_rows(tmp_path)
    assert replace(found, check_host_seconds=None) == replace(row, check_host_seconds=None)


def test_a_hung_variant_is_killed(planted):
    worker = WorkerProcess([planted], {"PLANTED_SLEEP": "1"}, timeout_s=3)
    case = next(iter(OPS["gather"].cases("compare")))
    try:
        with pytest.raises(WorkerDied, match="no answer for 3 s") as caught:
            worker.ask("check", op="gather", variant="planted_sleep", case=case, gpu=False)
        assert caught.value.stage == "planted_sleep"
        answer = worker.ask("check", op="gather", variant="planted_last", case=case, gpu=False)
        assert answer["status"] == "PASSED"
        with pytest.raises(TaskFailed, match="KeyError"):
            worker.ask("no such task")
    finally:
        worker.close()


class ScriptedWorker:
    """Answers in place of a worker: checks pass; timing goes by a script of failures."""

    def __init__(self, *failures, wrong=()):
        self.failures = list(failures)
        self.wrong = wrong
        self.timed = []

    def ask(self, task, on_stage=None, **arguments):
        if task == "check":
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


def timed_rows(worker):
    variants = [("raw_element", "gpu"), ("raw_warp", "gpu"), ("raw_tile", "gpu")]
    case = next(iter(OPS["gather"].cases("compare")))
    steps = []
    made = Session(
        OPS["gather"],
        gpu=True,
        variants=variants,
        problems=[Problem(case)],
        reproduce=lambda *row: "again",
        on_progress=lambda done, text: steps.append(done),
    )
    made.worker = worker
    (rows,) = made.run()
    assert sum(steps) == made.steps
    return {row.variant: row for row in rows}


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


def test_a_variant_file_that_does_not_import_is_named(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("import nothing_of_that_name")
    found = CliRunner().invoke(app, ["compare", "--variant-file", str(path)])
    assert found.exit_code == 2
    assert "broken.py" in found.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_op"], "no op 'no_such_op'"),
        (["--variants", "no_such"], "no variant matches 'no_such'"),
        (["--target", "tpu"], "'tpu'"),
        (["--dims", "gpt2"], "no such preset"),
        (["--dims", "Q=4"], "expected letters"),
        (["--dims", "R=3"], "even number"),
        (["--dtype", "int4"], "'int4'"),
        (["--trace", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--case", "no such case"], "nothing to run"),
    ],
)
def test_bad_options_are_named(arguments, message):
    found = CliRunner().invoke(app, ["compare", *arguments], env={"COLUMNS": "500"})
    assert found.exit_code == 2
    assert message in found.output


@pytest.mark.parametrize("name", ["compare", "list", "doctor"])
def test_help_teaches(name):
    found = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "120"})
    assert found.exit_code == 0
    assert len(found.output.splitlines()) > 8


def test_list_shows_every_variant_and_why_it_cannot_run():
    found = CliRunner().invoke(app, ["list", "--json"])
    assert found.exit_code == 0
    listed = json.loads(found.output)
    assert set(listed) == set(OPS)
    for op in OPS.values():
        assert [each["variant"] for each in listed[op.name]] == list(op.variants)
        for each in listed[op.name]:
            assert each["idea"], f"{op.name} {each['variant']} has no docstring"
            if no_device_reason():
                assert each["where"]["gpu"] == no_device_reason()
    text = CliRunner().invoke(app, ["list", "gather"], env={"COLUMNS": "120"}).output
    assert all(name in text for name in OPS["gather"].variants)


def test_scripts_run_by_path():
    done = command("gather", script="experiments/listing.py")
    assert done.returncode == 0, done.stderr
    assert "raw_tile" in done.stdout


def test_doctor_says_what_is_there():
    found = CliRunner().invoke(app, ["doctor", "--json"])
    assert found.exit_code == 0
    findings = {each["name"]: each for each in json.loads(found.output)}
    assert findings["Python"]["status"] == "ok"
    assert findings["ops"]["detail"].startswith(f"{len(OPS)} ops")
    for each in findings.values():
        assert each["status"] in doctor.STYLES
        assert each["status"] == "ok" or each["advice"] or each["detail"]


def test_doctor_shows_brackets_of_extras(capsys):
    advice = "pip install 'mla-sandbox[torch]'"
    doctor.console.print(doctor._table([doctor.Finding("torch", "missing", "none", advice)]))
    assert "[torch]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("versions", "clash"),
    [
        ({"numpy": (2, 5), "numba_cuda": (0, 30)}, ("NumPy and Numba", "numpy<2.5")),
        ({"nvrtc": (12, 9), "headers": 13000}, ("NVRTC and headers", "cu12")),
        ({"nvrtc": (13, 0), "headers": 12090}, ("NVRTC and headers", "cuda-toolkit")),
        ({"nvrtc": (13, 0), "driver": 12080}, ("NVRTC and driver", "cupy-cuda12x")),
        ({"nvrtc": (12, 9), "cupy_wheel": 13}, ("CuPy and NVRTC", "cupy-cuda12x")),
    ],
)
def test_doctor_names_version_clashes(versions, clash):
    (found,) = doctor.clashes(doctor.Versions(**{"numpy": (2, 4), **versions}))
    assert found.status == "clash"
    assert found.name == clash[0]
    assert clash[1] in found.advice


def test_doctor_finds_no_clash_in_what_fits():
    fits = doctor.Versions((2, 4), (0, 30), (12, 9), 12080, 13000, 12)
    assert list(doctor.clashes(fits)) == []


def test_dims_and_dtype_replace_those_of_the_cases():
    name, dims = plan.parse_dims("kimi_k2,N=8,L=256")
    assert name == "kimi_k2_N8_L256"
    assert (dims.N, dims.L, dims.R) == (8, 256, 64)
    assert plan.parse_dims("tiny") == ("tiny", PRESETS["tiny"])
    planner = Planner(Selection(dims="N=8,L=256", dtype="fp16", batches=2), ["host"])
    problems = planner.problems(OPS["gather"])
    assert {p.case.dims.L for p in problems} == {256}
    assert {p.case.dtype.name for p in problems} == {"float16"}
    assert all(p.altered for p in problems)
    names = [p.case.name for p in problems]
    assert len(names) == len(set(names))


def test_batches_are_scaled_for_the_cpu_and_whole_on_a_gpu():
    on_cpu = Planner(Selection(), ["host", "sim", "cpu"]).problems(OPS["concat_insert_decode"])
    scaled = [p for p in on_cpu if p.scaled]
    assert {p.case.size for p in scaled} == {"small", "medium"}
    assert all(p.case.workload.context_tokens <= 2048 for p in scaled)
    on_gpu = Planner(Selection(), ["gpu"]).problems(OPS["concat_insert_decode"])
    batches = [p for p in on_gpu if "generated" in p.case.name]
    assert len(batches) == 4
    assert not any(p.scaled for p in batches)
    assert max(p.case.workload.context_tokens for p in batches) > 100_000
    asked = Planner(Selection(scale=100), ["gpu"]).problems(OPS["concat_insert_decode"])
    assert all("div100" in p.case.name for p in asked if "generated" in p.case.name)


def test_a_trace_replaces_the_cases_of_the_op(tmp_path):
    path = tmp_path / "t.jsonl"
    line = {"timestamp": 0, "input_length": 700, "output_length": 3, "hash_ids": [1, 2]}
    again = {"timestamp": 99, "input_length": 900, "output_length": 3, "hash_ids": [1, 3]}
    path.write_text(f"{json.dumps(line)}\n{json.dumps(again)}\n")
    planner = Planner(Selection(trace=path, batches=9), ["gpu"])

    def contexts(op):
        return {p.case.workload.context_lens for p in planner.problems(OPS[op])}

    assert contexts("gather") == {(512,)}
    assert contexts("concat_insert_decode") == {(700,), (701,)}


def test_a_case_that_the_op_turns_down_is_unavailable_not_an_error(tmp_path, planted):
    done = command(
        "compare", "gather", "--variant-file", planted, "--variants", "planted_last", "--target",
        "cpu", "--case", "tiny-int32", "--dtype", "int32", "--quick", "--out", tmp_path,
    )  # fmt: skip
    (row,) = read_rows(tmp_path)
    assert row.status == "UNAVAILABLE"
    assert "cache is int32, expected" in row.message
    assert done.returncode == 0


def test_numbers_are_short_and_keep_three_digits():
    shown = {0.0: "0", 1234.5: "1234", 12.345: "12.3", 1.2345: "1.23", 0.01234: "0.012"}
    assert {value: tables.number(value) for value in shown} == shown
    assert tables.number(float("inf")) == "inf"
    assert tables.number(None) == ""


def test_json_has_no_infinity(tmp_path, planted_run):
    row = next(row for row in read_rows(planted_run[1]) if row.variant == "planted_wrong")
    run = results.Run(tmp_path)
    run.add([replace(row, error=float("inf"))])
    run.close()
    text = (tmp_path / "rows.jsonl").read_text()
    assert "Infinity" not in text
    assert read_rows(tmp_path)[0].error == float("inf")
