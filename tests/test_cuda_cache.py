"""The artefact cache under parallel, killed and failing builders."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sandbox.kernels.cuda import MissingDependency, cache, nvrtc
from sandbox.kernels.cuda.cache import cache_dir, cached


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("MLA_SANDBOX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def files(home: Path) -> list[Path]:
    return [path for path in home.rglob("*") if path.is_file() and path.suffix != ".lock"]


def start(program: str, *arguments: object) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
    )


def test_builds_once_and_keeps(home):
    built = []

    def build(path: Path) -> None:
        built.append(path)
        path.write_text("content")

    first = cached("key", ".txt", build)
    assert cached("key", ".txt", build) == first
    assert first.read_text() == "content"
    assert first.suffix == ".txt"
    assert len(built) == 1
    assert built[0] != first
    assert files(home) == [first]
    assert cached("other key", ".txt", build) != first


def test_cache_dir_follows_the_environment(monkeypatch):
    monkeypatch.delenv("MLA_SANDBOX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_dir() == Path("/somewhere/mla-sandbox")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache/mla-sandbox"


@pytest.mark.parametrize("damage", [b"", b"cont", b"Content", b"contentcontent"])
def test_damaged_file_is_built_again(home, damage):
    path = cached("key", ".bin", lambda path: path.write_bytes(b"content"))
    path.write_bytes(damage)
    again = cached("key", ".bin", lambda path: path.write_bytes(b"content"))
    assert again.read_bytes() == b"content"
    assert files(home) == [again]


def test_other_content_replaces_a_damaged_file(home):
    cached("key", ".bin", lambda path: path.write_bytes(b"first")).write_bytes(b"damaged")
    again = cached("key", ".bin", lambda path: path.write_bytes(b"second"))
    assert files(home) == [again]
    assert again.read_bytes() == b"second"


def test_failed_build_leaves_nothing(home):
    def fail(path: Path) -> None:
        path.write_text("half")
        raise KeyError("no such thing")

    with pytest.raises(KeyError, match="no such thing"):
        cached("key", ".txt", fail)
    with pytest.raises(RuntimeError, match="empty file"):
        cached("key", ".txt", lambda path: path.write_bytes(b""))
    assert files(home) == []
    assert cached("key", ".txt", lambda path: path.write_text("whole")).read_text() == "whole"


KILLED = """
import sys, time
from sandbox.kernels.cuda.cache import cached
def build(path):
    path.write_text("half of the con")
    print("building", flush=True)
    time.sleep(60)
cached("key", ".txt", build)
"""


def test_killed_builder_holds_nobody_up(home):
    builder = start(KILLED)
    with builder:
        assert builder.stdout.readline() == "building\n"
        waiting = start(
            "from sandbox.kernels.cuda.cache import cached\n"
            "cached('key', '.txt', lambda path: path.write_text('content'))"
        )
        with waiting:
            builder.send_signal(signal.SIGKILL)
            _, errors = waiting.communicate(timeout=20)
            assert waiting.returncode == 0, errors
    found = cached("key", ".txt", lambda path: pytest.fail("already built"))
    assert found.read_text() == "content"
    assert files(home) == [found]


RACE = """
import os, sys
from pathlib import Path
from sandbox.kernels.cuda import nvrtc
from sandbox.kernels.cuda.source import KernelSource
real = nvrtc._compile
def compile_and_tell(*arguments):
    os.write(1, b"compiled\\n")
    return real(*arguments)
nvrtc._compile = compile_and_tell
source = KernelSource(Path(sys.argv[1]), "scale")
for _ in range(8):
    if not os.fork():
        path = nvrtc.compile_cubin(source, {"T": "__nv_bfloat16"}, "sm_90")
        os.write(1, f"{path}\\n".encode())
        os._exit(0)
assert [os.wait()[1] for _ in range(8)] == [0] * 8
"""


def test_eight_processes_race_for_one_kernel(home):
    try:
        nvrtc.nvrtc_version()
    except MissingDependency as missing:
        pytest.skip(str(missing))
    with start(RACE, Path(__file__).with_name("cuda_kernels") / "scale.cu") as race:
        output, errors = race.communicate(timeout=60)
    assert race.returncode == 0, errors
    printed = output.split()
    assert printed.count("compiled") == 1
    paths = [line for line in printed if line != "compiled"]
    assert len(paths) == 8
    assert len(set(paths)) == 1
    assert sorted(path.suffix for path in files(home)) == [".cubin", ".ptxas"]


def test_unwritable_home_falls_back(tmp_path, monkeypatch):
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the folder should be")
    monkeypatch.setenv("MLA_SANDBOX_CACHE", str(blocked / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(cache, "_private_dir", cache._private_dir.__wrapped__)
    path = cached("key", ".txt", lambda path: path.write_text("content"))
    assert path.is_relative_to(tmp_path / f"mla-sandbox-{os.getuid()}")
    assert cached("key", ".txt", lambda path: pytest.fail("already built")) == path


def test_private_dir_of_somebody_else_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    planted = tmp_path / f"mla-sandbox-{os.getuid()}"
    planted.mkdir()
    planted.chmod(0o777)
    assert cache._private_dir.__wrapped__() != planted
