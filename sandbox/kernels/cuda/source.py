"""A `.cu` file as text: what it includes, its kernels' signatures, where NVIDIA's headers are."""

import hashlib
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


class MissingDependency(RuntimeError):
    """A compiler, a library or a set of headers is not installed; the message says what to do."""


class CompileError(RuntimeError):
    """A compiler refused a kernel: `log` is what it said, `macros` what the file was given."""

    def __init__(self, path: Path, macros: Mapping[str, str], target: str, log: str):
        settings = " ".join(f"{name}={value}" for name, value in macros.items()) or "no macros"
        super().__init__(f"{path} does not compile for {target} ({settings}):\n{log.strip()}")
        self.path, self.macros, self.target, self.log = path, dict(macros), target, log


@dataclass(frozen=True)
class Param:
    """One parameter of a kernel.

    `ctype` is its type as written, without `const`, the last `*` and `__restrict__`; `const` says
    whether what a pointer points to (or the value) is constant.
    """

    name: str
    ctype: str
    pointer: bool
    const: bool


@dataclass(frozen=True)
class KernelSource:
    """The function `entry`, declared `extern "C" __global__`, of the file at `path`."""

    path: Path
    entry: str

    @property
    def folder(self) -> Path:
        """Where compilers look for the headers that the file includes in quotes."""
        return _placed(self.path).parent

    def digest(self) -> str:
        """Hash of the file and of every header of ours that it includes, as they are now.

        Raises:
            ValueError: an `#include` names no header itself, but a macro.
        """
        total = hashlib.sha256()
        for path, foreign in _with_includes(self.path):
            file = _scan(path)
            total.update(f"{file.content_hash} {file.includes} {foreign}\n".encode())
        return total.hexdigest()

    def system_includes(self) -> tuple[str, ...]:
        """The headers that the file and our headers include and that are not ours."""
        files = _with_includes(self.path)
        return tuple(dict.fromkeys(name for _, foreign in files for name in foreign))

    @property
    def params(self) -> tuple[Param, ...]:
        """The parameters in order; ValueError when the file has no such kernel."""
        return _signature(self.path, self.entry, _identity(self.path))


@dataclass(frozen=True)
class _File:
    content_hash: str
    includes: tuple[tuple[str, bool], ...]  # name, in quotes


def _identity(path: Path) -> tuple[int, ...]:
    found = path.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino


def _scan(path: Path) -> _File:
    return _scan_version(path, _identity(path))


_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include\b[ \t]*(?:([<"])([^>"\n]+)[>"])?', re.MULTILINE)


@lru_cache(maxsize=1024)
def _scan_version(path: Path, identity: tuple[int, ...]) -> _File:
    content = path.read_bytes()
    text = _without_comments(content.decode(errors="replace"))
    includes = _INCLUDE.findall(text)
    if ("", "") in includes:
        raise ValueError(f"{path}: an #include names no header: changes of it would go unnoticed")
    return _File(
        hashlib.sha256(content).hexdigest(), tuple((name, mark == '"') for mark, name in includes)
    )


def _with_includes(path: Path) -> Iterator[tuple[Path, list[str]]]:
    """The file and every header of ours it reaches, each with the headers it includes of others.

    Headers are looked for as the compilers do: in quotes beside the file that includes them, then
    beside the kernel, then among ours.
    """
    path = _placed(path)
    seen, waiting = {path}, [path]
    while waiting:
        current = waiting.pop()
        foreign = []
        for name, quoted in _scan(current).includes:
            folders = (*(current.parent,) * quoted, path.parent, include_dir())
            header = next((f / name for f in folders if (f / name).is_file()), None)
            if header is None:
                foreign.append(name)
            elif (header := _placed(header)) not in seen:
                seen.add(header)
                waiting.append(header)
        yield current, foreign


def _placed(path: Path) -> Path:
    """One path for a file in a folder; of a link, whose own headers are those beside the link."""
    return Path(os.path.realpath(path.parent)) / path.name


@lru_cache(maxsize=256)
def _signature(path: Path, entry: str, identity: tuple[int, ...]) -> tuple[Param, ...]:
    return parse_signature(path.read_text(), entry, str(path))


_COMMENT_OR_LITERAL = re.compile(
    r"""//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])')""", re.DOTALL
)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*$", re.MULTILINE)


def _without_comments(text: str) -> str:
    return _COMMENT_OR_LITERAL.sub(lambda match: match[1] or " ", text)


_QUALIFIERS = re.compile(r"\b(const|volatile|restrict|__restrict|__restrict__|__grid_constant__)\b")
_DIRECTIVE_MARK = "\0"


def parse_signature(text: str, entry: str, where: str = "source") -> tuple[Param, ...]:
    """Parameters of `extern "C" __global__ void entry(...)` in `text`."""
    text = _without_comments(text)
    text = _DIRECTIVE.sub(_DIRECTIVE_MARK, text)
    known = []
    for match in re.finditer(r"\b([A-Za-z_]\w*)\s*\(", text):
        head = re.split(rf"[;{{}}{_DIRECTIVE_MARK}]", text[: match.start()])[-1]
        if "__global__" not in head or not re.search(r"\bvoid\b", head):
            continue
        if re.fullmatch(r"__\w+__", match[1]):  # __launch_bounds__( and its kind
            continue
        known.append(match[1])
        if match[1] != entry:
            continue
        if not re.search(r'extern\s*"C"', head):
            raise ValueError(f'{where}: kernel {entry} must be declared extern "C" __global__')
        inside = _balanced(text, match.end(), f"{where}: {entry}")
        if _DIRECTIVE_MARK in inside:
            raise ValueError(f"{where}: preprocessor line inside the signature of {entry}")
        pieces = _split_commas(inside)
        if len(pieces) == 1 and pieces[0].strip() in ("", "void"):
            return ()
        return tuple(_parse_param(piece, f"{where}: {entry}") for piece in pieces)
    listed = ", ".join(dict.fromkeys(known)) or "none"
    raise ValueError(
        f'{where}: no extern "C" __global__ void {entry}(...); kernels there: {listed}'
    )


def _balanced(text: str, start: int, where: str) -> str:
    depth = 1
    for position in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        if not depth:
            return text[start:position]
    raise ValueError(f"{where}: the parameter list is not closed")


def _split_commas(text: str) -> list[str]:
    pieces, depth = [""], 0
    for character in text:
        depth += {"<": 1, "(": 1, "[": 1, ">": -1, ")": -1, "]": -1}.get(character, 0)
        if character == "," and not depth:
            pieces.append("")
        else:
            pieces[-1] += character
    return pieces


def _parse_param(text: str, where: str) -> Param:
    written = " ".join(text.split())
    pointee, star, declarator = written.rpartition("*")
    const = re.search(r"\bconst\b", pointee if star else declarator) is not None
    plain = " ".join(_QUALIFIERS.sub(" ", written).split())
    match = re.fullmatch(r"(.+?[\s*>])\s*([A-Za-z_]\w*)\s*(\[\w*\])?", plain)
    if match is None or "&" in plain or "..." in plain:
        raise ValueError(f"{where}: cannot read the parameter {written!r}; write `type name`")
    ctype, name, array = match[1].strip(), match[2], match[3]
    pointer = bool(array) or ctype.endswith("*")
    if pointer and not array:
        ctype = ctype[:-1].strip()
    return Param(name, re.sub(r"^(struct|enum)\s+", "", ctype), pointer, const)


def include_dir() -> Path:
    """The folder of our own `.cuh` headers."""
    return Path(__file__).with_name("include")


def cuda_include_dirs(major: int | None = None) -> list[Path]:
    """NVIDIA's headers: folders that together hold `cuda_bf16.h`, `cuda_fp8.h` and `nv/target`.

    `major` is the CUDA version to match, by default that of the installed CuPy wheel; another
    version is taken only when there is none of that one. Looked for among the `nvidia-*` wheels,
    the active conda environment, `CUDA_HOME` and `CUDA_PATH`, and `/usr/local/cuda*`.
    """
    wanted = cupy_wheel_major() if major is None else major
    complete = [dirs for dirs in _header_sets() if _is_complete(dirs)]
    if not complete:
        raise MissingDependency(
            "no CUDA headers (cuda_bf16.h, cuda_fp8.h, nv/target): "
            "pip install 'mla-sandbox[host]', or set CUDA_HOME to a CUDA toolkit"
        )
    same = [dirs for dirs in complete if wanted and cuda_header_version(dirs) // 1000 == wanted]
    return [folder.absolute() for folder in (same or complete)[0]]


@lru_cache(maxsize=8)
def cuda_headers_hash(dirs: tuple[Path, ...]) -> str:
    """Hash of what NVIDIA's own headers in these folders say."""
    total = hashlib.sha256()
    for path in [path for folder in dirs for path in sorted(folder.glob("cuda*.h*"))]:
        total.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return total.hexdigest()


def cuda_header_version(dirs: list[Path]) -> int:
    """The headers' CUDA version as they write it, 12090 for 12.9; 0 when they do not say."""
    for folder in dirs:
        for name, macro in (("cuda_runtime_api.h", "CUDART_VERSION"), ("cuda.h", "CUDA_VERSION")):
            if number := _defined(folder / name, macro):
                return number
    return 0


def cupy_wheel_major() -> int | None:
    """CUDA major version of the installed `cupy-cuda*` wheel, without importing it."""
    for major in (13, 12, 11):
        try:
            version(f"cupy-cuda{major}x")
            return major
        except PackageNotFoundError:
            continue
    return None


@lru_cache(maxsize=64)
def _defined(header: Path, macro: str) -> int:
    try:
        text = header.read_text(errors="replace")
    except OSError:
        return 0
    match = re.search(rf"^#define\s+{macro}\s+(\d+)", text, re.MULTILINE)
    return int(match[1]) if match else 0


def _is_complete(dirs: list[Path]) -> bool:
    needed = ("cuda_bf16.h", "cuda_fp8.h", "nv/target")
    return all(any((folder / name).is_file() for folder in dirs) for name in needed)


def _header_sets() -> Iterator[list[Path]]:
    # From CUDA 13 the C++ core libraries (nv/target) lie in a folder of their own; CuPy has a copy.
    fallback = _package_dirs("cupy", "_core/include/cupy/_cccl/libcudacxx")
    for include in _toolkit_includes():
        dirs = [include, include / "cccl", include.parents[1] / "cuda_cccl/include"]
        dirs = [folder for folder in dirs if folder.is_dir()]
        yield dirs if any((d / "nv/target").is_file() for d in dirs) else dirs + fallback


def _toolkit_includes() -> Iterator[Path]:
    for root in _package_dirs("nvidia", "."):
        yield root / "cuda_runtime/include"
        yield from sorted(root.glob("cu[0-9]*/include"), reverse=True)
    machine = "sbsa" if platform.machine() == "aarch64" else platform.machine()
    for prefix in filter(None, (os.environ.get("CONDA_PREFIX"), sys.prefix)):
        yield Path(prefix) / f"targets/{machine}-linux/include"
        yield Path(prefix) / "include"
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if root := os.environ.get(variable):
            yield Path(root) / "include"
    for root in sorted(Path("/usr/local").glob("cuda*")):
        yield root / "include"


def _package_dirs(package: str, inside: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    roots = spec.submodule_search_locations if spec else None
    return [found for root in roots or () if (found := Path(root, inside).resolve()).is_dir()]
