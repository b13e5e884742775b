"""The README's example is a variant that works, and its commands exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def python(*arguments, cwd=ROOT):
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "160"},
    )


@pytest.fixture
def example(tmp_path):
    source = next(block for block in blocks("cuda") if "my_gather" in block)
    launcher = next(block for block in blocks("python") if '@gather.variant("my_gather"' in block)
    (tmp_path / "my_gather.cu").write_text(source)
    (tmp_path / "my_gather.py").write_text(launcher)
    return tmp_path


def compare_command():
    line = next(line for line in README.splitlines() if "--variant-file my_gather.py" in line)
    return line.removeprefix("python ").split()


def test_the_example_variant_is_right(example):
    command = [*compare_command(), "--quick", "--target", "host", "--out", str(example / "run")]
    run = python(*command, cwd=example)
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"my_gather\s+host\s+[1-9]", run.stdout), run.stdout


def test_a_wrong_example_is_caught(example):
    path = example / "my_gather.cu"
    path.write_text(path.read_text().replace("offset < 0 ? 0 : from[i]", "from[i + 1]"))
    command = [*compare_command(), "--quick", "--target", "host", "--out", str(example / "run")]
    run = python(*command, cwd=example)
    assert run.returncode == 1
    assert re.search(r"WRONG|ERROR", run.stdout)


def test_the_ops_example_runs():
    use, debug = (b for b in blocks("python") if "num_tokens=9" in b)
    run = python("-W", "error", "-c", use + debug)
    assert run.returncode == 0, run.stderr


def test_commands_exist():
    commands = {re.match(r"python -m experiments (\w+)", line) for line in README.splitlines()}
    names = {match[1] for match in commands if match}
    assert {"doctor", "list", "compare", "resources"} <= names
    for name in names:
        run = python("-m", "experiments", name, "--help")
        assert run.returncode == 0, run.stderr


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^make (\w+)", README, flags=re.MULTILINE))
    assert targets == {"compare", "test"}
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)


def test_links_lead_somewhere():
    for readme in [ROOT / "README.md", *(ROOT / "sandbox").rglob("README.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", readme.read_text()):
            if "://" not in target:
                assert (readme.parent / target).exists(), f"{readme}: {target}"
