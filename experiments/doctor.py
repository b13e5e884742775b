"""What this machine can do, and what to install for the rest."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import typer

from experiments.cli import run_as_script, say
from experiments.fingerprint import driver_version, package_version
from sandbox import arrays
from sandbox.kernels import OPS, cublas, numba_target
from sandbox.kernels.cuda import cache, device_info, host_runner, no_device_reason, nvrtc, source

STYLES = {"ok": "", "missing": "yellow", "clash": "bold red", "broken": "bold red"}


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `status` is ok, missing (something is not possible without it), clash
    (versions that do not fit) or broken (nothing works); `advice` says what to do."""

    name: str
    status: str
    detail: str
    advice: str = ""


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """What this machine can do, what is missing, and what to install for it.

    The exit code is 0 when the base works: Python, NumPy, the ops and their oracles. All else adds
    a target: a GPU with CuPy and NVRTC (timings), a C++ compiler with CUDA headers (the CUDA
    sources on the CPU), Numba (its simulator or the GPU), torch (baselines).
    """
    findings = list(examine())
    if as_json:
        typer.echo(json.dumps([asdict(each) for each in findings], indent=2))
    else:
        show(findings)
    if any(each.status == "broken" for each in findings):
        raise typer.Exit(1)


def show(findings: list[Finding]) -> None:
    """A line a finding, its status first, and what to do below it."""
    indent = max(map(len, STYLES)) + 2
    for each in findings:
        line = f"{each.status:{indent}}{each.name}: {each.detail}"
        say(line, STYLES[each.status], indent)
        if each.advice:
            say(f"{'':{indent}}to do: {each.advice}", indent=indent)


def examine() -> Iterator[Finding]:
    """All findings, the base first."""
    base = (_python, _numpy, _ops)
    kernels = (_gpu, _cupy, _nvrtc, _headers, _compiler, _numba)
    others = (_products, _torch, _transformers, _jax, _cache)
    for check in base + kernels + others:
        yield from _guarded(check)
    yield from clashes(_versions())


def _guarded(check: Callable[[], Finding]) -> Iterator[Finding]:
    try:
        yield check()
    except Exception as failure:
        name = check.__name__.lstrip("_")
        yield Finding(name, "missing", f"could not be examined: {failure}")


def _python() -> Finding:
    return Finding("Python", "ok", f"{platform.python_version()} at {sys.executable}")


def _numpy() -> Finding:
    versions = f"NumPy {package_version('numpy')}, ml_dtypes {package_version('ml_dtypes')}"
    return Finding("NumPy", "ok", versions)


def _ops() -> Finding:
    try:
        count = sum(len(op.variants) for op in OPS.values())
    except Exception as failure:
        return Finding("ops", "broken", f"a variant's file does not import: {failure}")
    return Finding("ops", "ok", f"{len(OPS)} ops, {count} variants: {', '.join(OPS)}")


def _gpu() -> Finding:
    found = device_info()
    if found is None:
        advice = "none needed: correctness is checked on the CPU; only timings need a GPU"
        return Finding("GPU", "missing", no_device_reason() or "no GPU", advice)
    major, minor = found.cc
    driver = driver_version() or "unknown"
    detail = (
        f"{found.name}, compute capability {major}.{minor}, {found.memory_bytes / 1e9:.0f} GB, "
        f"{found.l2_bytes / 2**20:.0f} MiB L2, driver {driver}"
    )
    if found.cc < (7, 5):
        return Finding("GPU", "missing", detail, "compute capability 7.5 or newer is needed")
    return Finding("GPU", "ok", detail)


def _cupy() -> Finding:
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as failure:
        advice = "pip install 'mla-sandbox[cuda12]' or '[cuda13]', by the driver's CUDA version"
        return Finding("CuPy", "missing", str(failure), advice)
    return Finding("CuPy", "ok", f"{cupy.__version__} for CUDA {source.cupy_wheel_major() or '?'}")


def _nvrtc() -> Finding:
    try:
        version = ".".join(map(str, nvrtc.nvrtc_version()))
    except source.MissingDependency as failure:
        return Finding("NVRTC", "missing", "kernels cannot be compiled for a GPU", str(failure))
    lacking = [reason for arch in nvrtc.ARCHITECTURES if (reason := nvrtc.unsupported(arch))]
    return Finding("NVRTC", "ok", "; ".join([version, *lacking]))


def _headers() -> Finding:
    try:
        folders = source.cuda_include_dirs()
    except source.MissingDependency as failure:
        return Finding("CUDA headers", "missing", "not found", str(failure))
    version = _release(source.cuda_header_version(folders))
    return Finding("CUDA headers", "ok", f"{version} in {', '.join(map(str, folders))}")


def _compiler() -> Finding:
    if reason := host_runner.unavailable_reason():
        return Finding("host runner", "missing", "CUDA sources cannot run on the CPU", reason)
    return Finding("host runner", "ok", f"C++ compiler {host_runner.compiler()}")


def _numba() -> Finding:
    target = "sim" if numba_target.SIMULATED else "gpu"
    versions = f"Numba {package_version('numba')}, numba-cuda {package_version('numba-cuda')}"
    floor = ".".join(map(str, numba_target.OLDEST_NUMBA_CUDA))
    if reason := numba_target.unavailable_reason(target):
        return Finding("Numba", "missing", versions, reason)
    place = "its simulator, on the CPU" if target == "sim" else "the GPU"
    return Finding("Numba", "ok", f"{versions} (at least {floor}), on {place}")


def _torch() -> Finding:
    if importlib.util.find_spec("torch") is None:
        advice = "pip install 'mla-sandbox[torch]' for the baselines"
        return Finding("torch", "missing", "not installed", advice)
    version = package_version("torch")
    if arrays.torch_has_cuda():
        return Finding("torch", "ok", f"{version}, on the GPU and the CPU")
    detail = f"{version}, on the CPU: a CPU build, or it sees no GPU"
    if device_info() is not None:
        advice = "install a CUDA build of torch to have the baselines on the GPU"
        return Finding("torch", "missing", detail, advice)
    return Finding("torch", "ok", detail)


def _products() -> Finding:
    """The matrix products of a layer."""
    if device_info() is None:
        return Finding("products", "ok", "NumPy's, on the CPU")
    try:
        return Finding("products", "ok", f"cuBLAS {cublas.version()}, on the GPU")
    except Exception as failure:
        advice = "pip install nvidia-cublas (CUDA 13) or nvidia-cublas-cu12, for layers on a GPU"
        return Finding("products", "missing", str(failure), advice)


def _transformers() -> Finding:
    advice = "pip install 'mla-sandbox[models]' to compare the layer with Hugging Face's"
    return _package("transformers", "transformers", advice)


def _jax() -> Finding:
    return _package("JAX", "jax", "none needed, unless you want to pass JAX arrays")


def _package(name: str, distribution: str, advice: str) -> Finding:
    version = package_version(distribution)
    if version is None:
        return Finding(name, "missing", "not installed", advice)
    return Finding(name, "ok", version)


def _cache() -> Finding:
    folder = cache.cache_dir()
    if not folder.is_dir():
        return Finding("kernel cache", "ok", f"{folder}, empty")
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    detail = f"{folder}, {len(sizes)} files, {sum(sizes) / 1e6:.1f} MB; it may be deleted"
    if not os.access(folder, os.W_OK):
        advice = "set MLA_SANDBOX_CACHE to a folder that can be written"
        return Finding("kernel cache", "missing", f"{folder} cannot be written", advice)
    return Finding("kernel cache", "ok", detail)


@dataclass(frozen=True)
class Versions:
    """What has to fit together; None for what is not there. `headers` as NVIDIA writes it: 12090
    for 12.9; `driver` the newest CUDA that it runs, in the same form."""

    numpy: tuple[int, ...]
    numba_cuda: tuple[int, ...] | None = None
    nvrtc: tuple[int, int] | None = None
    headers: int | None = None
    driver: int | None = None
    cupy_wheel: int | None = None


def clashes(versions: Versions) -> Iterator[Finding]:
    """Versions that do not fit together, each with what to install instead."""
    if versions.numpy >= (2, 5) and versions.numba_cuda and versions.numba_cuda < (0, 31):
        yield Finding(
            "NumPy and Numba",
            "clash",
            f"NumPy {_dotted(versions.numpy)} with numba-cuda {_dotted(versions.numba_cuda)}",
            "pip install 'numpy<2.5'",
        )
    if versions.nvrtc and versions.headers and versions.nvrtc[0] != versions.headers // 1000:
        yield Finding(
            "NVRTC and headers",
            "clash",
            f"NVRTC {_dotted(versions.nvrtc)} with headers of CUDA {_release(versions.headers)}",
            f"install headers of CUDA {versions.nvrtc[0]}: pip install "
            + _header_wheels(versions.nvrtc[0]),
        )
    if versions.nvrtc and versions.driver and versions.nvrtc[0] > versions.driver // 1000:
        yield Finding(
            "NVRTC and driver",
            "clash",
            f"NVRTC {_dotted(versions.nvrtc)}, but the driver runs up to CUDA "
            f"{_release(versions.driver)}",
            f"update the driver, or pip install cupy-cuda{versions.driver // 1000}x[ctk]",
        )
    if versions.cupy_wheel and versions.nvrtc and versions.cupy_wheel != versions.nvrtc[0]:
        yield Finding(
            "CuPy and NVRTC",
            "clash",
            f"CuPy is for CUDA {versions.cupy_wheel}, NVRTC is {_dotted(versions.nvrtc)}",
            f"pip install cupy-cuda{versions.nvrtc[0]}x, or NVRTC of CUDA {versions.cupy_wheel}",
        )


def _versions() -> Versions:
    return Versions(
        numpy=_numbers(package_version("numpy")) or (0,),
        numba_cuda=_numbers(package_version("numba-cuda")),
        nvrtc=_attempt(nvrtc.nvrtc_version),
        headers=_attempt(lambda: source.cuda_header_version(source.cuda_include_dirs())),
        driver=_attempt(_driver_cuda) or None,
        cupy_wheel=source.cupy_wheel_major(),
    )


def _driver_cuda() -> int:
    return importlib.import_module("cupy").cuda.runtime.driverGetVersion()


def _attempt(question: Callable[[], object]) -> object:
    try:
        return question()
    except Exception:
        return None


def _numbers(version: str | None) -> tuple[int, ...] | None:
    if version is None:
        return None
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _release(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}" if number else "unknown version"


def _header_wheels(major: int) -> str:
    if major >= 13:
        return f"'cuda-toolkit[cccl,cudart,crt]=={major}.*'"
    return f"nvidia-cuda-runtime-cu{major} nvidia-cuda-cccl-cu{major}"


if __name__ == "__main__":
    run_as_script(doctor)
