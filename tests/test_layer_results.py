"""What the layer's experiment makes of its contenders: times, rows, tables, a run's folder."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from numpy_as_cupy import NumpyAsCupy
from typer.testing import CliRunner

from experiments import (
    layer_bench,
    layer_plots,
    layer_report,
    layer_rows,
    layer_tables,
    report,
    tables,
)
from experiments.__main__ import app
from experiments.layer_problems import Problem, decodes, prefills
from experiments.layer_rows import LayerRow
from experiments.layer_stages import ATTENTION_AND_GEMMS, STAGES, attention_and_gemm_percent
from experiments.results import read_rows
from sandbox.dims import PRESETS


def problem(shape):
    made = prefills(shape) if "+" in shape else decodes(shape)
    tiny = PRESETS["tiny"]
    return Problem(made[0], tiny, "tiny", "float32", "float32", block_size=4, workspace_rows=8)


@pytest.fixture
def timing(monkeypatch):
    pytest.importorskip("cupy")
    from experiments import gpu_timing, gpu_work, layer_timing

    small_l2 = SimpleNamespace(l2_bytes=10_000)
    monkeypatch.setattr(layer_timing, "device_info", lambda: small_l2)
    monkeypatch.setattr(gpu_timing.Filler, "BYTES", 64)
    monkeypatch.setattr(gpu_timing.measure, "MAX_ROUNDS", 20)
    for module in (gpu_timing, gpu_work, layer_timing):
        monkeypatch.setattr(module, "cp", NumpyAsCupy(20.0))
    for module in (gpu_timing, gpu_work):
        monkeypatch.setattr(module, "copy_bytes", lambda target, source: None)
    layer_bench._held.clear()
    return layer_timing


def timed_on_stream(timing, made, names):
    held = layer_bench.bench(made, False, None)
    return timing.time_on_stream(held, names, np.zeros(64, np.uint8), 9.0, lambda stage: None)


class TestTiming:
    def test_steps_and_stages(self, timing, monkeypatch):
        from experiments import gpu_timing

        capture = gpu_timing.captured

        def only_copies(name, calls, launches):
            if name == "copy":
                return capture(name, calls, launches)
            assert launches == 1
            raise RuntimeError("no capture here")

        monkeypatch.setattr(gpu_timing, "captured", only_copies)
        names = ["layer", "layer[gather=torch]", "torch_compiled"]
        found = timed_on_stream(timing, problem("5+9"), names)
        assert found["wrong"] == {}
        assert list(found["timings"]) == names
        for columns in found["timings"].values():
            assert columns["samples_us"] == [20.0] * 20
            assert (columns["method"], columns["l2"], columns["launches"]) == ("eager", "cold", 1)
            assert columns["copy_us"] == 20.0 / 50, "fifty copies a replay"
            assert "cannot be captured" in columns["note"]
        assert set(found["stages"]) == set(names[:2])
        stages = found["stages"]["layer"]
        assert set(stages) <= set(STAGES)
        assert stages["output projection"] == 20.0
        assert stages["merge"] == stages["gather"] == 2 * 20.0, "two chunks of context"
        assert stages["prefill attention"] == 3 * 20.0
        layer = layer_bench.bench(problem("5+9"), False, None).contender("layer", str).layer
        assert layer.overlap_tokens > 0
        assert layer.on_stage is None

    def test_a_graph_that_computes_nothing_has_no_time(self, timing):
        found = timed_on_stream(timing, problem("2x6"), ["layer"])
        assert found["timings"] == {}
        assert "NaN" in found["wrong"]["layer"]


def gpu_row(name, shape="32x4096", **changes):
    made = Problem(
        decodes(shape)[0] if "x" in shape else prefills(shape)[0],
        PRESETS["deepseek_v3"],
        "deepseek_v3",
        "bfloat16",
        "bfloat16",
    )
    row = layer_rows.blank(made, name, True, "python -m experiments layer")
    return replace(row, status="PASSED", error=0.2, workspace_bytes=5_000_000, **changes)


def answer(**medians):
    columns = {"launches": 1, "sets": 1, "l2": "cold", "method": "graph"}
    timings = {
        name: {**columns, "samples_us": (us - 1, us, us + 1), "copy_us": 100.0, "note": ""}
        for name, us in medians.items()
    }
    stages = {"projections": 60.0, "insert": 10.0, "decode attention": 130.0}
    return {"timings": timings, "stages": {"layer": stages}}


MEDIANS = {"layer": 200.0, "layer[rms_norm=torch]": 220.0, "torch_compiled": 500.0}


def timed(changes=()):
    rows = [replace(gpu_row(name), **dict(changes).get(name, {})) for name in MEDIANS]
    return layer_rows.timed(rows, answer(**MEDIANS), 800.0)


class TestRows:
    def test_what_follows_from_a_time(self):
        layer, swap, compiled = timed()
        assert (layer.speedup, swap.speedup, compiled.speedup) == (1.0, 200 / 220, 0.4)
        assert layer.tokens_per_s == pytest.approx(32 / 200e-6)
        assert layer.attention_and_gemm_percent == pytest.approx(95.0)
        assert layer.limit_by == "memory"
        assert layer.percent_of_limit == pytest.approx(50.0)
        assert [row.rank for row in (layer, swap, compiled)] == [1, 2, 3]
        assert compiled.stages_us == {}

    def test_no_time_for_what_is_wrong(self):
        layer, swap, _ = timed({"layer": {"status": "WRONG"}})
        assert layer.median_us is layer.tokens_per_s is layer.attention_and_gemm_percent is None
        assert layer.stages_us == {}
        assert swap.median_us == 220.0
        assert swap.speedup is None

    def test_tables_say_where_a_swap_matters(self):
        rows = timed()
        lines = [
            line
            for _, line in tables.text_lines("layer", rows, columns=layer_tables.columns_for(rows))
        ]
        assert max(map(len, lines)) <= 150
        assert any("torch_compiled" in line and "0.400" in line for line in lines)
        said = dict(layer_tables.sections(rows))
        swaps, stages, memory = said.values()
        assert swaps == ["layer[rms_norm=torch]: 1.10x on decode_32x4096-bfloat16"]
        assert stages == [
            "decode_32x4096-bfloat16, 95% in attention and GEMMs: projections 60.0 (30%), "
            "insert 10.0 (5%), decode attention 130 (65%)"
        ]
        assert memory == [
            "weights 374 MB; cache + workspace: decode_32x4096-bfloat16 151 + 5.00 MB"
        ]

    def test_pictures_and_page(self, tmp_path):
        rows = timed()
        made = layer_plots.plot(rows, tmp_path)
        assert [path.name for path in made] == [
            "layer_times.png",
            "layer_correctness.png",
            "layer_swaps_times.png",
            "layer_swaps_correctness.png",
            "layer_stages.png",
        ]
        found = {"gpu": {"name": "H200"}, "date": "", "commit": "abc", "dirty": False}
        report.write(tmp_path / "report.html", rows, found, made, layer_report.PAGE)
        page = (tmp_path / "report.html").read_text()
        assert page.count("data:image/png") == 5
        assert "1.10x on decode_32x4096" in page
        assert "<title>The whole MLA layer</title>" in page

    def test_share_of_attention_and_gemms(self):
        assert set(STAGES) > ATTENTION_AND_GEMMS
        assert attention_and_gemm_percent({}) is None
        assert attention_and_gemm_percent({"norm": 1.0, "absorb": 3.0}) == 75.0


PLANTED = '''
import os
from sandbox.kernels import OPS
right = OPS["decode_attention"].variants["reference"].run

@OPS["decode_attention"].variant("planted_wrong", kind="numpy")
def planted_wrong(**arguments):
    """Forgets the last key."""
    seq_lens = arguments["seq_lens"] - 1
    right(**arguments | {"seq_lens": seq_lens})

@OPS["decode_attention"].variant("planted_exit", kind="numpy")
def planted_exit(**arguments):
    """Leaves."""
    os._exit(3)
'''


def test_the_command(tmp_path):
    (tmp_path / "planted.py").write_text(PLANTED)
    command = ["layer", "--dims", "tiny", "--prefill", "none", "--format", "float32"]
    command += ["--contenders", "layer", "--out", str(tmp_path / "run")]
    command += ["--variant-file", str(tmp_path / "planted.py")]
    for swap in ("planted_wrong", "planted_exit"):
        command += ["--swap", f"decode_attention={swap}"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1, done.output
    rows = read_rows(tmp_path / "run", LayerRow)
    assert {row.variant: row.status for row in rows} == {
        "layer": "PASSED",
        "layer[decode_attention=planted_wrong]": "WRONG",
        "layer[decode_attention=planted_exit]": "ERROR",
    }
    assert all(row.median_us is None and row.samples_us == () for row in rows)
    assert all(row.stages_us == {} for row in rows)
    assert "exit code 3" in rows[2].message
    assert "WRONG layer layer[decode_attention=planted_wrong] on cpu" in done.output
    assert rows[1].reproduce in done.output
    assert "median" not in done.output, "no time is shown"
    names = {path.name for path in (tmp_path / "run").iterdir()}
    expected = {"rows.jsonl", "fingerprint.json", "table.txt", "table.md", "report.html"}
    assert names == expected | {"layer_correctness.png", "layer_swaps_correctness.png"}
    found = json.loads((tmp_path / "run" / "fingerprint.json").read_text())
    assert found["packages"]["transformers"]
    assert found["bf16_gemm_tflop_per_s"] is None


def test_a_run_that_was_interrupted_at_once(tmp_path, capsys):
    layer_report.show([], tmp_path, None)
    assert "0 passed" in capsys.readouterr().out
