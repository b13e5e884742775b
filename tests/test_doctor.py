"""What `doctor` finds, and how it reads."""

import io
import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from experiments import cli, doctor
from experiments.__main__ import app
from sandbox.kernels import OPS


def test_doctor_says_what_is_there():
    found = CliRunner().invoke(app, ["doctor", "--json"])
    assert found.exit_code == 0
    findings = {each["name"]: each for each in json.loads(found.output)}
    assert findings["Python"]["status"] == "ok"
    assert findings["ops"]["detail"].startswith(f"{len(OPS)} ops")
    for each in findings.values():
        assert each["status"] in doctor.STYLES
        assert each["status"] == "ok" or each["advice"] or each["detail"]


@pytest.fixture
def narrow(monkeypatch):
    """A terminal of 60 columns; returns the lines of what `show` prints."""
    found = io.StringIO()
    screen = Console(file=found, force_terminal=True, width=60, color_system=None)
    monkeypatch.setattr(cli, "console", screen)
    return lambda: found.getvalue().splitlines()


def test_long_findings_are_wrapped_between_words(narrow):
    path = "/a/path/that/no/line/is/long/enough/for/and/must/stay/whole/to/be/copied"
    advice = "pip install 'mla-sandbox[torch]' for the baselines of every op, and then some"
    doctor.show([doctor.Finding("CUDA headers", "missing", f"12.9 in {path}, found", advice)])
    lines = narrow()
    assert lines[0] == "missing  CUDA headers: 12.9 in"
    assert lines[1] == f"         {path},"
    assert any(
        line.startswith("         to do: pip install 'mla-sandbox[torch]'") for line in lines
    )
    assert all(len(line) <= 60 for line in lines if path not in line)


def test_piped_findings_are_a_line_each(capsys):
    doctor.show([doctor.Finding("ops", "ok", "word " * 60), doctor.Finding("JAX", "ok", "9")])
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        "ok       ops",
        "ok       JAX",
    ]


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
