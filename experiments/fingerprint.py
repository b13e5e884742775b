"""What a run was made with: GPU, clocks, versions, the state of the sources."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import sandbox
from sandbox.kernels.cuda import device_info, no_device_reason, nvrtc, source

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "numpy",
    "ml_dtypes",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "numba",
    "numba-cuda",
    "torch",
    "transformers",
    "jax",
)
_CLOCKS = ("clocks.sm", "clocks.mem", "clocks.max.sm", "power.limit", "temperature.gpu")


def fingerprint(command: list[str]) -> dict[str, Any]:
    """Everything that a later reader needs to judge whether two runs can be compared."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "sources": source_hash(),
        "gpu": asdict(device_info()) if device_info() else None,
        "no_gpu_because": no_device_reason(),
        "driver": driver_version(),
        "clocks": clocks(),
        "nvrtc": _nvrtc_version(),
        "cuda_headers": _header_version(),
        "packages": {name: found for name in PACKAGES if (found := package_version(name))},
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
    }


def source_hash() -> str:
    """Hash of every Python and CUDA source under `sandbox/`."""
    folder = Path(sandbox.__file__).parent
    total = hashlib.sha256()
    kinds = {".py", ".cu", ".cuh", ".h", ".hpp", ".cpp", ".S"}
    for path in sorted(folder.rglob("*")):
        if path.suffix in kinds and path.is_file():
            total.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:16]


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def driver_version() -> str | None:
    """The NVIDIA driver's version as `nvidia-smi` says it."""
    answer = _nvidia_smi("driver_version")
    return answer[0] if answer else None


def clocks() -> dict[str, str] | None:
    """Clocks (MHz), power limit (W) and temperature (C) at this moment."""
    answer = _nvidia_smi(",".join(_CLOCKS))
    return dict(zip(_CLOCKS, answer)) if answer else None


def _nvidia_smi(query: str) -> list[str] | None:
    answer = _output(
        ["nvidia-smi", "-i", "0", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    )
    return [part.strip() for part in answer.splitlines()[0].split(",")] if answer else None


def _git(*arguments: str) -> str | None:
    return _output(["git", "-C", str(ROOT), *arguments])


def _output(command: list[str]) -> str | None:
    """What a command prints; None where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _nvrtc_version() -> str | None:
    try:
        return ".".join(map(str, nvrtc.nvrtc_version()))
    except source.MissingDependency:
        return None


def _header_version() -> int | None:
    try:
        return source.cuda_header_version(source.cuda_include_dirs())
    except source.MissingDependency:
        return None


def command_line() -> list[str]:
    """This process's command as one would type it."""
    name = Path(sys.argv[0]).name
    if name == "__main__.py":
        return ["python", "-m", "experiments", *sys.argv[1:]]
    return ["python", f"experiments/{name}", *sys.argv[1:]]
