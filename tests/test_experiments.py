"""The command line, the workers, what a run leaves behind."""

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments import results, tables
from experiments.__main__ import app
from experiments.results import COLUMNS, STATUSES, read_rows
from experiments.worker_process import TaskFailed, WorkerDied, WorkerProcess
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

@gather.variant("planted_idle", kind="numpy")
def planted_idle(**arguments):
    """Writes nothing."""

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
            "planted_idle": "WRONG",
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
    place = r"RuntimeError: planted \(planted.py:\d+, in planted_raise\)"
    assert re.search(place, messages["planted_raise"])
    assert messages["planted_refusal"] == "it is Monday"
    assert "must match bit for bit" in messages["planted_wrong"]
    assert "got nan (never written), expected" in messages["planted_idle"]
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
    rows = read_rows(folder)
    failed, passed = sum(row.failed for row in rows), sum(row.status == "PASSED" for row in rows)
    assert 0 < passed < failed
    verdict = f"{failed} failed, {passed} passed; everything is in {folder}/"
    assert verdict in done.stdout.splitlines()


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
    worker = WorkerProcess([planted], {"PLANTED_SLEEP": "1"}, timeout_s=5)
    case = next(iter(OPS["gather"].cases("compare")))
    try:
        with pytest.raises(WorkerDied, match="no answer for 5 s") as caught:
            worker.ask("check", op="gather", variant="planted_sleep", case=case, gpu=False)
        assert caught.value.stage == "planted_sleep"
        answer = worker.ask("check", op="gather", variant="planted_last", case=case, gpu=False)
        assert answer["status"] == "PASSED"
        with pytest.raises(TaskFailed, match="KeyError"):
            worker.ask("no such task")
    finally:
        worker.close()


@pytest.mark.parametrize("name", ["2026-11-30-formats", "2026-11-30-raw-samples"])
def test_rows_of_older_runs_are_read(name):
    rows = read_rows(ROOT / "results" / "h200" / name)
    assert len(rows) > 80
    assert {row.limit_us for row in rows} == {row.percent_of_gemm for row in rows} == {None}
    assert all(row.percent_of_copy > 0 for row in rows if row.median_us)
    for op in {row.op for row in rows}:
        table = tables.text_table(op, [row for row in rows if row.op == op])
        assert "% of limit" not in table
        assert "copy of as many bytes" in table


def test_a_variant_file_with_a_name_of_ours_is_named(tmp_path):
    path = tmp_path / "clash.py"
    path.write_text(
        "from sandbox.kernels import gather\n"
        '@gather.variant("raw_tile", kind="numpy")\n'
        "def mine(**arguments):\n"
        '    """Nothing."""\n'
    )
    found = CliRunner().invoke(app, ["compare", "gather", "--variant-file", str(path)])
    assert found.exit_code != 0
    said = " ".join(found.output.split())
    assert "clash.py: ValueError: gather already has a variant 'raw_tile' (clash.py:2" in said


def test_a_variant_file_that_does_not_import_is_named(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("import nothing_of_that_name")
    found = CliRunner().invoke(app, ["compare", "--variant-file", str(path)])
    assert found.exit_code == 2
    assert "broken.py" in found.output


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


PEEK = """
extern "C" __global__ void peek(const float* in, float* out) { out[0] = in[1]; }
"""
PEEKING = '''
from pathlib import Path
import numpy as np
from sandbox.kernels import OPS
from sandbox.kernels.cuda import CudaKernel

KERNEL = CudaKernel(Path(__file__).with_suffix(".cu"), "peek")

@OPS["gather"].variant("peeking", kind="cuda")
def peeking(**arguments):
    """Right, but for a read beyond an array."""
    OPS["gather"].variants["reference"].run(**arguments)
    KERNEL(1, 1, np.zeros(1, np.float32), np.zeros(1, np.float32), macros={})
'''


def test_the_checked_build_finds_a_read_out_of_bounds(tmp_path):
    (tmp_path / "peeking.cu").write_text(PEEK)
    (tmp_path / "peeking.py").write_text(PEEKING)
    done = command(
        "compare", "gather", "--variant-file", tmp_path / "peeking.py", "--variants", "peeking",
        "--target", "host", "--case", CASE, "--quick", "--checked", "--out", tmp_path / "run",
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    (row,) = read_rows(tmp_path / "run")
    assert row.checked
    assert "KernelFault" in row.message
    assert "--checked" in shlex.split(row.reproduce)
    assert "checked build, shuffled schedule" in (tmp_path / "run" / "table.txt").read_text()


def test_json_has_no_infinity(tmp_path, planted_run):
    row = next(row for row in read_rows(planted_run[1]) if row.variant == "planted_wrong")
    run = results.Run(tmp_path)
    run.add([replace(row, error=float("inf"))])
    run.close()
    text = (tmp_path / "rows.jsonl").read_text()
    assert "Infinity" not in text
    assert read_rows(tmp_path)[0].error == float("inf")
