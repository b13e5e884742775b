"""CUDA C++ to machine code with NVRTC, for any architecture, on a machine with or without a GPU."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

from sandbox.kernels.cuda.cache import cached
from sandbox.kernels.cuda.cubin import kernel_info
from sandbox.kernels.cuda.source import (
    CompileError,
    KernelSource,
    MissingDependency,
    cuda_headers_hash,
    cuda_include_dirs,
    cupy_wheel_major,
    include_dir,
)

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120")

# CuPy's own compile path would add -ftz=true, which flushes denormals, and needs a driver.
_OPTIONS = ("-std=c++17", "-default-device", "-lineinfo", "--ptxas-options=-v")
_CACHE_SINCE = (12, 9)  # NVRTC's own cache, which leaves out the report of ptxas
_REGISTERS_OF_A_BLOCK = 65536


@dataclass(frozen=True)
class Resources:
    """What one kernel takes on one architecture.

    `spill_stores`, `spill_loads` and `stack` are bytes a thread, `static_shared` bytes a block;
    `max_threads` is the largest block, limited by `__launch_bounds__` and the registers.
    """

    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    static_shared: int
    max_threads: int


def nvrtc_version() -> tuple[int, int]:
    """Version of the NVRTC that CuPy loads; MissingDependency when there is none."""
    return _nvrtc()[1]


def unsupported(arch: str) -> str | None:
    """Why this NVRTC cannot compile for `arch` ("sm_90a"), or None when it can."""
    nvrtc, (major, minor) = _nvrtc()
    number = re.fullmatch(r"sm_(\d+)[af]?", arch)
    if number is None:
        return f"{arch!r} is no architecture; write sm_90, sm_90a, ..."
    known = nvrtc.getSupportedArchs()
    if int(number[1]) in known:
        return None
    return f"NVRTC {major}.{minor} compiles for sm_{min(known)} to sm_{max(known)}, not for {arch}"


def device_arch(cc: tuple[int, int], arch_specific: bool = False) -> str:
    """The architecture to compile for on a device of compute capability `cc`.

    A device newer than NVRTC runs the code of an earlier one of its major version, but not
    architecture-specific code (`sm_90a`).
    """
    known = _nvrtc()[0].getSupportedArchs()
    number = cc[0] * 10 + cc[1]
    if arch_specific and number >= 90:
        return f"sm_{number}a"
    fitting = [n for n in known if n // 10 == cc[0] and n <= number]
    return f"sm_{max(fitting, default=number)}"


def compile_cubin(source: KernelSource, macros: Mapping[str, str], arch: str) -> Path:
    """Path of the machine code of `source`'s file for `arch`, compiled when it is not cached.

    `macros` maps names to C text. Raises CompileError or MissingDependency.
    """
    key = _key(source, macros, arch)

    def build(path: Path) -> None:
        code, log = _compile(source, macros, arch)
        path.write_bytes(code)
        cached(f"{key}\nlog", ".ptxas", lambda beside: beside.write_text(log))

    return cached(key, ".cubin", build)


def resources(source: KernelSource, macros: Mapping[str, str], arch: str) -> Resources:
    """What `source.entry` takes on `arch`, from compiling it."""
    cubin = compile_cubin(source, macros, arch).read_bytes()

    def build(path: Path) -> None:
        path.write_text(_compile(source, macros, arch)[1])

    log = cached(f"{_key(source, macros, arch)}\nlog", ".ptxas", build).read_text()
    return _parse_ptxas(log, source.entry, kernel_info(cubin, source.entry).launch_bound)


def _parse_ptxas(log: str, entry: str, launch_bound: int | None) -> Resources:
    parts = re.split(r"Compiling entry function '([^']+)'[^\n]*", log)
    text = dict(zip(parts[1::2], parts[2::2], strict=True))[entry]

    def largest(pattern: str) -> int:
        return max(map(int, re.findall(pattern, text)), default=0)

    def total(pattern: str) -> int:  # functions that were not inlined have lines of their own
        return sum(map(int, re.findall(pattern, text)))

    registers = largest(r"Used (\d+) registers")
    warps = _REGISTERS_OF_A_BLOCK // (-(-max(registers, 1) // 8) * 8 * 32) // 4 * 4
    return Resources(
        registers=registers,
        spill_stores=total(r"(\d+) bytes spill stores"),
        spill_loads=total(r"(\d+) bytes spill loads"),
        stack=largest(r"(\d+) bytes stack frame") or largest(r"(\d+) bytes cumulative stack"),
        static_shared=largest(r"(\d+) bytes smem"),
        max_threads=min(launch_bound or 1024, warps * 32, 1024),
    )


@cache
def _nvrtc() -> tuple[ModuleType, tuple[int, int]]:
    try:
        from cupy.cuda import nvrtc
    except ImportError as error:
        raise MissingDependency(
            f"CuPy cannot be imported ({error}): pip install cupy-cuda12x or cupy-cuda13x"
        ) from error
    try:
        return nvrtc, tuple(nvrtc.getVersion())
    except Exception as error:  # CuPy raises various types when the library is not there
        wheel = "nvidia-cuda-nvrtc" + {12: "-cu12", 11: "-cu11"}.get(cupy_wheel_major(), "")
        reason = " ".join(str(error).split())
        raise MissingDependency(
            f"NVRTC cannot be loaded ({reason}): pip install {wheel}"
        ) from error


def _headers(source: KernelSource) -> list[Path]:
    return cuda_include_dirs(nvrtc_version()[0]) if source.system_includes() else []


def _key(source: KernelSource, macros: Mapping[str, str], arch: str) -> str:
    version = f"nvrtc {nvrtc_version()} headers {cuda_headers_hash(tuple(_headers(source)))}"
    text = _text(source, macros).replace(str(source.path), source.path.name)
    return "\n".join([source.digest(), arch, version, *_OPTIONS, text])


def _compile(source: KernelSource, macros: Mapping[str, str], arch: str) -> tuple[bytes, str]:
    if reason := unsupported(arch):
        raise MissingDependency(reason)
    nvrtc, version = _nvrtc()
    folders = [source.folder, include_dir(), *_headers(source)]
    options = [f"-arch={arch}", *_OPTIONS, *(f"-I{folder}" for folder in folders)]
    if version >= _CACHE_SINCE:
        options.append("-no-cache")
    place = str(source.folder / source.path.name)  # where headers in quotes are looked for
    program = nvrtc.createProgram(_text(source, macros), place, (), ())
    try:
        nvrtc.compileProgram(program, options)
        return nvrtc.getCUBIN(program), nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program) or str(error)
        raise CompileError(source.path, macros, arch, log) from None
    finally:
        nvrtc.destroyProgram(program)


def _text(source: KernelSource, macros: Mapping[str, str]) -> str:
    """The file with its macros in front of it, and in front of those the headers that are not ours,
    whose own names (`T`, above all) the macros must not change."""
    headers = (
        f"#if __has_include(<{name}>)\n#include <{name}>\n#endif"
        for name in source.system_includes()
    )
    defines = (f"#define {name} {value}" for name, value in macros.items())
    line = f'#line 1 "{source.path}"'
    return "\n".join([*headers, *defines, line, source.path.read_text()])
