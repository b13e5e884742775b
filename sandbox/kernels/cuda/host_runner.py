"""CUDA C++ on a CPU: compile a `.cu` file with the C++ compiler and run its kernel there.

The threads of a block are fibers of one OS thread that change places at barriers and warp
exchanges only; blocks are spread over the cores. Divergent barriers, warps that wait for lanes that
never come, traps and assertions are faults in every build. The checked build adds, exactly and
without a sanitizer's library: accesses outside an argument's elements or shared memory, misaligned
vector accesses, writes through `const` parameters, shared memory read before it is written, races
on shared memory, integer overflow, bad shifts, and indices past a fixed-size array. Two accesses of
a warp are in order after a `__syncwarp` only: shuffles and votes order no memory.

Not modelled: blocks that wait for one another, memory that one thread reads by spinning on another
of its block (unless it calls `__nanosleep`), inline PTX, and more than 256 KB of locals a thread.
A wild access of the plain build ends the process, as it would on any CPU. clang++ does not check
the alignment of structs copied whole, g++ does.
"""

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np

from sandbox.kernels.cuda.cache import cached
from sandbox.kernels.cuda.host_arrays import GuardedArrays
from sandbox.kernels.cuda.host_places import resolve
from sandbox.kernels.cuda.source import (
    CompileError,
    KernelSource,
    MissingDependency,
    cuda_headers_hash,
    cuda_include_dirs,
    include_dir,
)

MAX_BLOCK_THREADS = 1024
MAX_SHARED_BYTES = 227 * 1024
MAX_GRID = (2**31 - 1, 65535, 65535)

_HOST = Path(__file__).with_name("host")
_PRELUDE = "sandbox_host.h"
_PLAIN = ("-O2",)
_CHECKED = (
    "-O1",
    "-g1",
    "-gdwarf-4",  # addr2line misreads the file names of version 5
    "-fno-builtin-memcpy",  # calls of these are checked, their inline code would not be
    "-fno-builtin-memmove",
    "-fno-builtin-memset",
    "-fsanitize=thread",
    "-fsanitize=alignment,bounds,signed-integer-overflow,shift-exponent,integer-divide-by-zero,null",
)
_PLAIN_LINK = ("-Wl,--wrap=__assert_fail",)
_CHECKED_LINK = (*_PLAIN_LINK, *(f"-Wl,--wrap={name}" for name in ("memcpy", "memmove", "memset")))
_ALWAYS = (
    "-std=c++17",
    "-fPIC",
    "-fno-strict-aliasing",  # kernels reinterpret memory as vectors, as CUDA lets them
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fvisibility=hidden",  # a kernel may be named as a function of the C library
    "-U_FORTIFY_SOURCE",
    "-w",
)


class KernelFault(RuntimeError):
    """A kernel did what it must not: the message names kernel, block, thread and what happened."""


class HostModule:
    """The kernel `source.entry` with `macros` defined (name to C text), compiled for the CPU.

    `checked` chooses the build that verifies every access. Raises MissingDependency without a
    compiler or NVIDIA's headers, CompileError when the file does not compile.
    """

    def __init__(self, source: KernelSource, macros: Mapping[str, str], *, checked: bool):
        self.source, self.checked = source, checked
        self._params = source.params
        self._runtime = _runtime()
        self.path = _build(source, macros, checked)
        self._library = ctypes.CDLL(str(self.path))
        size_of = self._library.sandbox_parameter_bytes
        self._sizes = [size_of(i) for i in range(len(self._params))]

    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        arguments: Sequence[object],
        *,
        shared_bytes: int = 0,
        seed: int | None = None,
        global_races: bool = False,
    ) -> None:
        """Run the kernel and return when all blocks are done.

        An argument is a NumPy array or None for a pointer, else a ctypes scalar of the parameter's
        type or a struct's `bytes`. `seed` shuffles the order in which blocks and threads run, and
        fills shared memory with NaN. With `global_races` the checked build also forbids that two
        threads of the launch write the same byte of an argument, atomics aside. Raises ValueError
        for what no GPU would launch, TypeError for arguments that do not match the parameters,
        KernelFault.
        """
        _check_limits(grid, block, shared_bytes)
        guard = GuardedArrays(self._params, arguments) if self.checked else None
        if guard:
            arguments = guard.arguments
        holders = [
            _holder(*each) for each in zip(self._params, self._sizes, arguments, strict=True)
        ]
        pointers = (ctypes.c_void_p * max(1, len(holders)))(*map(ctypes.addressof, holders))
        message = ctypes.create_string_buffer(4096)
        launch = _Launch(
            kernel=self.source.entry.encode(),
            entry=_address(self._library.sandbox_entry),
            arguments=ctypes.cast(pointers, ctypes.c_void_p),
            grid=tuple(grid),
            block=tuple(block),
            shared_bytes=shared_bytes,
            shuffled=seed is not None,
            seed=(seed or 0) % 2**64,
            checked=self.checked,
            global_races=global_races,
            spans=ctypes.addressof(guard.spans) if guard else None,
            span_count=guard.count if guard else 0,
            static_shared=_address(self._library.sandbox_static_shared),
            message=ctypes.addressof(message),
            message_bytes=len(message),
        )
        failed = self._runtime.sandbox_launch(ctypes.byref(launch))
        if guard:
            guard.copy_back()
        if failed:
            raise KernelFault(resolve(message.value.decode(errors="replace"), self.path))


class _Launch(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_char_p),
        ("entry", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("shuffled", ctypes.c_int),
        ("seed", ctypes.c_uint64),
        ("checked", ctypes.c_int),
        ("global_races", ctypes.c_int),
        ("spans", ctypes.c_void_p),
        ("span_count", ctypes.c_int),
        ("static_shared", ctypes.c_void_p),
        ("message", ctypes.c_void_p),
        ("message_bytes", ctypes.c_size_t),
    ]


def _address(function: object) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value


def _check_limits(
    grid: tuple[int, int, int], block: tuple[int, int, int], shared_bytes: int
) -> None:
    if min(*grid, *block) < 1:
        raise ValueError(f"grid {grid} and block {block} must be at least 1 in every direction")
    if any(size > most for size, most in zip(grid, MAX_GRID, strict=True)):
        raise ValueError(f"grid {grid} exceeds {MAX_GRID}")
    if block[0] * block[1] * block[2] > MAX_BLOCK_THREADS or block[2] > 64:
        raise ValueError(f"block {block} exceeds {MAX_BLOCK_THREADS} threads, or 64 in z")
    if not 0 <= shared_bytes <= MAX_SHARED_BYTES:
        raise ValueError(f"shared_bytes {shared_bytes} is not within 0 and {MAX_SHARED_BYTES}")


def _holder(param, size: int, value: object) -> object:
    """A ctypes object that holds the argument as the kernel takes it."""
    if value is None and param.pointer:
        return ctypes.c_void_p()
    if isinstance(value, np.ndarray) and param.pointer:
        return ctypes.c_void_p(value.__array_interface__["data"][0])
    if isinstance(value, bytes):
        value = (ctypes.c_char * len(value)).from_buffer_copy(value)
    if param.pointer or not isinstance(value, (ctypes._SimpleCData, ctypes.Array)):
        raise TypeError(f"{param.name}: cannot pass {type(value).__name__} as {param.ctype}")
    if ctypes.sizeof(value) != size:
        raise TypeError(
            f"{param.name}: {ctypes.sizeof(value)} bytes given, {param.ctype} has {size}"
        )
    return value


def unavailable_reason() -> str | None:
    """Why kernels cannot be compiled for the CPU here, with what to install; None when they can."""
    try:
        compiler()
        cuda_include_dirs()
    except MissingDependency as error:
        return str(error)
    return None


def compiler() -> Path:
    """The C++ compiler: `$CXX`, or where that is not set g++, or clang++.

    Raises MissingDependency when there is none.
    """
    chosen = os.environ.get("CXX", "").strip()
    for name in (chosen,) if chosen else ("g++", "clang++"):
        if found := shutil.which(name):
            return Path(found).absolute()
    if chosen:
        raise MissingDependency(
            f"CXX is {chosen!r}, which is no program: name a compiler or unset it"
        )
    raise MissingDependency("no C++ compiler: install g++ or clang++, or set CXX")


def _stamp(path: Path) -> tuple[Path, int]:
    return path, path.stat().st_mtime_ns


@cache
def _compiler_identity(path: Path, changed: int) -> str:
    return subprocess.run([path, "--version"], capture_output=True, text=True).stdout


def _tools() -> str:
    """What, beside the source and the flags, decides a build's result.

    As in all keys here, contents and versions instead of the paths of folders, so that another
    checkout finds what one has built.
    """
    own = hashlib.sha256()
    for file in sorted(_HOST.rglob("*.h")) + sorted(_HOST.rglob("*.cpp")):
        own.update(file.read_bytes())
    path, changed = _stamp(compiler())
    identity = _compiler_identity(path, changed)
    searched = [os.environ.get(name) for name in ("CPATH", "CPLUS_INCLUDE_PATH")]
    headers = cuda_headers_hash(tuple(cuda_include_dirs()))
    return f"{path} {changed} {identity} {own.hexdigest()} {searched} {headers}"


@cache
def _runtime() -> ctypes.CDLL:
    """The part that runs kernels: compiled once, shared by all of them."""
    library = ctypes.CDLL(str(_runtime_path()))
    library.sandbox_launch.argtypes = [ctypes.c_void_p]
    return library


@cache
def _runtime_path() -> Path:
    names = sorted(path.name for path in _HOST.glob("runtime/*.cpp"))
    text = "".join(f'#include "{name}"\n' for name in names)
    flags = ["-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-shared", "-pthread"]

    def build(path: Path) -> None:
        search = ["-x", "c++", "-", f"-iquote{_HOST / 'runtime'}"]
        _compile([*flags, *search, "-o", str(path)], _HOST, {}, text, _HOST / "runtime")

    return cached(f"host runtime {_tools()} {flags}", ".so", build)


def _build(source: KernelSource, macros: Mapping[str, str], checked: bool) -> Path:
    runtime = _runtime_path()
    flags = [*_ALWAYS, *(_CHECKED if checked else _PLAIN)]
    flags += ["-DSANDBOX_HOST=1", f"-DSANDBOX_CHECKED={int(checked)}"]
    own = [f"-I{_HOST / 'include'}", f"-I{include_dir()}", f"-iquote{source.folder}"]
    theirs = [word for folder in cuda_include_dirs() for word in ("-isystem", str(folder))]
    link = ["-shared", "-Wl,-z,defs", *(_CHECKED_LINK if checked else _PLAIN_LINK)]
    text = _translation_unit(source, macros)

    def build(path: Path) -> None:
        search = [*_precompiled_prelude(flags, [*own[:1], *theirs]), *own, *theirs]
        code = path.with_suffix(".o")
        try:
            # Two steps, since a link with -fsanitize would bring the sanitizer's library.
            compiling = [*flags, *search, "-c", "-x", "c++", "-", "-o", str(code)]
            _compile(compiling, source.path, macros, text, source.folder)
            _compile([*link, str(code), str(runtime), "-o", str(path)], source.path, macros)
        finally:
            code.unlink(missing_ok=True)

    settings = [source.digest(), flags, link, str(runtime)]
    what = text.replace(str(source.path), source.path.name)
    key = f"host kernel {settings} {_tools()}\n{what}"
    return cached(key, ".so", build)


def _precompiled_prelude(flags: list[str], search: list[str]) -> list[str]:
    """Where g++ finds the prelude parsed already, which takes most of the time of a build."""
    if "clang" in _compiler_identity(*_stamp(compiler())):
        return []
    header = _HOST / "include" / _PRELUDE

    def build(path: Path) -> None:
        _compile([*flags, *search, "-x", "c++-header", str(header), "-o", str(path)], header, {})

    parsed = cached(f"host prelude {flags} {_tools()}", ".gch", build)
    folder = parsed.with_suffix("")
    with suppress(OSError):  # another process makes it, or the build goes without
        folder.mkdir(exist_ok=True)
        (folder / f"{_PRELUDE}.gch").symlink_to(parsed)
    return [f"-I{folder}"]


def _compile(
    arguments: list[str],
    path: Path,
    macros: Mapping[str, str],
    text: str | None = None,
    folder: Path | None = None,
) -> None:
    """Run the compiler, on a `text` that has its headers in `folder`."""
    done = subprocess.run(
        [compiler(), *arguments], input=text, capture_output=True, text=True, cwd=folder
    )
    if done.returncode:
        raise CompileError(path, macros, "the host", done.stderr)


_ATTRIBUTE = r"(?:__shared__|(?:__align__|alignas)\s*\([^()]*\))"
_DYNAMIC_SHARED = re.compile(
    rf"\bextern\s+(?=(?:{_ATTRIBUTE}\s*)*__shared__)(?:{_ATTRIBUTE}\s*)+"
    r"([\w:<>\s]+?)\s*\b(\w+)\s*\[\s*\]\s*;"
)


def _translation_unit(source: KernelSource, macros: Mapping[str, str]) -> str:
    # A lambda that captures cannot stand outside a function, where the pointer would be wrong.
    def pointer(declaration: re.Match) -> str:
        element, name = declaration.groups()
        value = f"[&] {{ return reinterpret_cast<{element}*>(sandbox_dynamic_shared); }}()"
        return f"{element}* const {name} = {value};" + "\n" * declaration[0].count("\n")

    text = _DYNAMIC_SHARED.sub(pointer, source.path.read_text())
    defines = "".join(f"#define {name} {value}\n" for name, value in macros.items())
    return (
        f'#include <{_PRELUDE}>\n{defines}#line 1 "{source.path}"\n{text}\n'
        f'#line 1 "entry"\nSANDBOX_KERNEL({source.entry})\n'
    )
