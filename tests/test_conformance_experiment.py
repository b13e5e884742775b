"""`python -m experiments conformance`: what it says of variants and of the user's functions."""

import json
import re

import numpy as np
import pytest
from typer.testing import CliRunner

from experiments.__main__ import app
from experiments.vector_checks import SIM_VALUES, sample
from sandbox.cache_formats.vectors import load
from sandbox.kernels import OPS

MINE = """
import numpy as np
from sandbox.cache_formats import FORMATS, Widths

def write(rows, *, cache_format, L, R, k_scale, tile_scale):
    scales = {"k_scale": k_scale, "tile_scale": tile_scale}
    return FORMATS[cache_format].encode(rows, Widths(L, R), **scales).view(np.uint8)

def read(stored, *, cache_format, L, R, k_scale):
    fmt = FORMATS[cache_format]
    return fmt.decode(stored.view(fmt.storage), Widths(L, R), k_scale=k_scale)

def read_in_bfloat16(stored, **how):
    return read(stored, **how).astype("bfloat16")

def raw_only(rows, *, tile_scale, **how):
    return write(rows, tile_scale="raw", **how)

def ds_mla_only(rows, **how):
    if how["cache_format"] != "fp8_ds_mla":
        raise NotImplementedError("only fp8_ds_mla")
    return write(rows, **how)

def floors(stored, *, cache_format, L, R, k_scale):
    end = L + L // 32
    stored[:, L:end] = (stored[:, L:end].copy().view(np.uint32) & 0xFF800000).view(np.uint8)
    return read(stored, cache_format=cache_format, L=L, R=R, k_scale=k_scale)

def last_byte(rows, **how):
    stored = write(rows, **how)
    stored[-1, -1] ^= 0x40
    return stored

def changes_its_input(rows, **how):
    stored = write(rows, **how)
    rows[...] = 0
    return stored

def raises(rows, **how):
    raise RuntimeError("no memory")

def signed(rows, **how):
    return write(rows, **how).view(np.int8)

def one_row(rows, **how):
    return write(rows, **how)[0]

def a_list(rows, **how):
    return write(rows, **how).tolist()

def torch_writer(rows, *, cache_format, L, R, k_scale, tile_scale):
    import torch
    codes = (rows.float() / k_scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(rows.isnan(), 0x7F, codes)
"""


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    path = tmp_path_factory.mktemp("mine") / "mine.py"
    path.write_text(MINE)
    return path


@pytest.fixture
def run(tmp_path):
    """Runs the experiment; returns its exit code, what it printed, and the rows it left."""

    def conformance(*arguments):
        arguments = ["conformance", *map(str, arguments), "--out", str(tmp_path)]
        done = CliRunner().invoke(app, arguments, env={"COLUMNS": "160"})
        path = tmp_path / "rows.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return done.exit_code, done.output, rows

    return conformance


@pytest.mark.parametrize("how", ["write", "ds_mla_only", "changes_its_input"])
def test_a_right_writer_passes(run, mine, how):
    code, output, rows = run("--writer", f"{mine}:{how}")
    assert code == 0, output
    statuses = {row["cache_format"]: row["status"] for row in rows}
    assert len(statuses) == len({each.cache_format for each in load()})
    others = "UNAVAILABLE" if how == "ds_mla_only" else "PASSED"
    assert statuses == {**dict.fromkeys(statuses, others), "fp8_ds_mla": "PASSED"}
    assert ("only fp8_ds_mla" in output) == (how == "ds_mla_only")


@pytest.mark.parametrize("how", ["read", "read_in_bfloat16"])
def test_a_right_reader_passes(run, mine, how):
    code, output, rows = run("--reader", f"{mine}:{how}", "--format", "int4_per_token,fp8_e4m3")
    assert code == 0, output
    labels = [v.label for v in load() if v.cache_format in ("int4_per_token", "fp8_e4m3")]
    assert sorted(row["vectors"] for row in rows) == sorted(labels)


def test_the_first_wrong_byte_is_shown(run, mine):
    code, output, rows = run("--writer", f"{mine}:last_byte", "--format", "fp8_ds_mla")
    assert code == 1
    assert re.search(r"WRONG writer .*mine.py:last_byte, fp8_ds_mla/all_bfloat16/512\+64/", output)
    assert "1 of 7296 elements of k_pe wrong, first in row 113, column 63: got" in output
    assert re.search(r"got 7f 40 \(3\.98\d*\), expected 7f 00 \(1\.16\d*e-38\)", output), output
    assert f"conformance --format fp8_ds_mla --tile-scale pow2 --writer {mine}:last_byte" in output
    wrong = next(row["mismatch"] for row in rows if row["status"] == "WRONG")
    assert (wrong["field"], wrong["row"], wrong["column"]) == ("k_pe", 113, 63)


def test_which_scales_a_writer_follows(run, mine):
    writer = ("--writer", f"{mine}:raw_only", "--format", "fp8_ds_mla")
    code, output, _ = run(*writer)
    assert code == 1
    assert "Likely it follows tile_scale 'raw'" in output
    assert re.search(r"fp8_ds_mla pow2 .* WRONG", output)
    assert re.search(r"fp8_ds_mla raw .* PASSED", output)
    assert run(*writer, "--tile-scale", "raw")[0] == 0


def test_a_reader_that_floors_scales_is_told_so(run, mine):
    code, output, rows = run("--reader", f"{mine}:floors", "--format", "fp8_ds_mla")
    assert code == 1
    assert "floors tile scales to powers of two, but they are any float32" in output
    failed = {row["vectors"].rsplit("/", 1)[1] for row in rows if row["status"] == "WRONG"}
    assert "raw" in failed
    assert "pow2" not in failed


@pytest.mark.parametrize(
    ("how", "status", "message"),
    [
        ("raises", "ERROR", "RuntimeError: no memory"),
        ("signed", "WRONG", "returned int8, expected uint8"),
        ("one_row", "WRONG", "shape (584,), expected (114, 584)"),
        ("a_list", "ERROR", "what .* returned"),
    ],
)
def test_answers_of_no_use(run, mine, how, status, message):
    code, output, rows = run("--writer", f"{mine}:{how}", "--format", "int8_per_token")
    assert code == 1
    assert {row["status"] for row in rows} == {status}
    assert re.search(message if "*" in message else re.escape(message), output), output


def test_a_function_of_tensors(run, mine):
    pytest.importorskip("torch")
    arguments = ("--writer", f"{mine}:torch_writer", "--format", "fp8_e4m3")
    assert run(*arguments, "--torch")[0] == 0
    code, output, _ = run(*arguments)
    assert code == 1
    assert "AttributeError: 'numpy.ndarray' object has no attribute 'float'" in output


def test_a_function_of_a_module(run, mine, monkeypatch):
    monkeypatch.syspath_prepend(mine.parent)
    assert run("--writer", "mine:write", "--format", "int8_per_token")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "nvfp4"], "'nvfp4'"),
        (["--tile-scale", "e8m0"], "expected pow2 or raw"),
        (["--writer", "nothing"], "expected FILE.py:function or module:function"),
        (["--writer", "nowhere.py:f"], "nowhere.py"),
        (["--reader", "no_such_module:f"], "no_such_module"),
        (["--reader", "json:no_such_function"], "no_such_function"),
        (["--op", "lse_merge"], "expected concat_insert, gather, dequantize_context"),
        (["--variants", "no_such"], "no variant matches"),
        (["--target", "tpu"], "'tpu'"),
        (["--op", "dequantize_context", "--format", "float32"], "nothing to check"),
    ],
)
def test_bad_options_are_named(run, arguments, message):
    code, output, _ = run(*arguments)
    assert code == 2
    assert message in output


PLANTED = '''
import os
from sandbox.kernels import OPS

@OPS["concat_insert"].variant("planted_right", kind="numpy")
def planted_right(**arguments):
    """Right."""
    OPS["concat_insert"].variants["reference"].run(**arguments)

@OPS["concat_insert"].variant("planted_wrong", kind="numpy")
def planted_wrong(**arguments):
    """Leaves the first token out."""
    OPS["concat_insert"].variants["reference"].run(**arguments)
    arguments["cache"].reshape(-1, arguments["cache"].shape[2])[arguments["slot_mapping"][0]] = 0

@OPS["concat_insert"].variant("planted_exit", kind="numpy")
def planted_exit(**arguments):
    """Leaves."""
    os._exit(3)

@OPS["concat_insert"].variant("planted_refusal", kind="numpy", supports=lambda **arguments: "rain")
def planted_refusal(**arguments):
    """Refuses."""
'''


def test_variants_of_the_ops(run, tmp_path, monkeypatch):
    insert = OPS["concat_insert"]
    monkeypatch.setattr(insert, "_variants", dict(insert.variants))
    path = tmp_path / "planted_inserts.py"
    path.write_text(PLANTED)
    code, output, rows = run(
        "--variant-file", path, "--variants", "planted_*,reference", "--target", "cpu",
        "--format", "fp8_ds_mla,bfloat16",
    )  # fmt: skip
    assert code == 1
    found = {}
    for row in rows:
        found.setdefault((row["name"], row["variant"]), set()).add(row["status"])
    assert found == {
        ("concat_insert", "reference"): {"PASSED"},
        ("gather", "reference"): {"PASSED"},
        ("dequantize_context", "reference"): {"PASSED"},
        ("concat_insert", "planted_right"): {"PASSED"},
        ("concat_insert", "planted_wrong"): {"WRONG"},
        ("concat_insert", "planted_exit"): {"ERROR"},
        ("concat_insert", "planted_refusal"): {"UNAVAILABLE"},
    }
    assert "the process died (exit code 3)" in output
    assert f"--variants planted_wrong --target cpu --variant-file {path}" in output
    assert "not run: concat_insert planted_refusal on cpu: " in output
    assert re.search(r"bfloat16 +reference,( planted_right)? +cpu +PASSED", output), output


def test_the_simulator_gets_a_few_rows_and_the_others_all():
    for each in load():
        for target in ("host", "cpu", "gpu", ""):
            np.testing.assert_array_equal(sample(each, target).stored, each.stored)
        some = sample(each, "sim")
        few = min(len(each.stored), SIM_VALUES // (each.L + each.R))
        assert len(some.stored) == few > 0
        assert few == 1 or len(np.unique(some.stored, axis=0)) > 1
