"""Compiled kernels on disk, shared by all processes of a user."""

import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

try:
    import fcntl
except ImportError:  # no POSIX locks: parallel builders then only repeat each other's work
    fcntl = None


def cache_dir() -> Path:
    """Where artefacts are kept: `$MLA_SANDBOX_CACHE`, else `mla-sandbox` in the user's cache."""
    if chosen := os.environ.get("MLA_SANDBOX_CACHE"):
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mla-sandbox"


def cached(key: str, suffix: str, build: Callable[[Path], None]) -> Path:
    """Path of the artefact that `key` (any text) describes; built when it is absent or damaged.

    `build(path)` must write the artefact at `path`, a temporary name with the same suffix. What it
    raises is passed on, and nothing is kept. Among parallel processes and threads one builds, the
    others wait for it; a builder that was killed holds nobody up. The file's name carries a hash
    of its content, so a truncated or altered file is noticed and built again. A cache directory
    that cannot be written is replaced by a private one in the system's temporary directory.
    """
    name = hashlib.sha256(key.encode()).hexdigest()[:32]
    home = cache_dir()
    if found := _find(home, name, suffix):
        return found
    try:
        with _locked(home, name) as exclusive:
            return _find(home, name, suffix) or _build(home, name, suffix, build, exclusive)
    except _Unwritable:
        home = _private_dir()
        with _locked(home, name) as exclusive:
            return _find(home, name, suffix) or _build(home, name, suffix, build, exclusive)


class _Unwritable(Exception):
    pass


def _folder(home: Path, name: str) -> Path:
    return home / name[:2]


def _content_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _find(home: Path, name: str, suffix: str) -> Path | None:
    for path in sorted(_folder(home, name).glob(f"{name}-*{suffix}")):
        try:
            if path.name == f"{name}-{_content_hash(path)}{suffix}":
                return path
        except OSError:
            continue
    return None


def _build(
    home: Path, name: str, suffix: str, build: Callable[[Path], None], exclusive: bool
) -> Path:
    folder = _folder(home, name)
    if exclusive:  # no other builder of this name is alive: its leavings and damaged files can go
        for stale in folder.glob(f"{name}*{suffix}"):
            stale.unlink(missing_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f"{name}.", suffix=f".tmp{suffix}", dir=folder)
    os.close(handle)
    temporary = Path(temporary)
    try:
        build(temporary)
        if not temporary.stat().st_size:
            raise RuntimeError(f"the build of {suffix} left an empty file")
        final = folder / f"{name}-{_content_hash(temporary)}{suffix}"
        os.replace(temporary, final)
    finally:
        temporary.unlink(missing_ok=True)
    return final


@contextmanager
def _locked(home: Path, name: str) -> Iterator[bool]:
    """Hold the lock of `name`; gives False where the file system has no locks."""
    try:
        folder = _folder(home, name)
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(folder)
        lock = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise _Unwritable from error
    exclusive = False
    try:
        if fcntl is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                exclusive = True
            except OSError:
                pass
        yield exclusive
    finally:
        if exclusive:  # closing is not enough: a forked child may hold the same descriptor
            fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)


@cache
def _private_dir() -> Path:
    owner = os.getuid() if hasattr(os, "getuid") else 0
    path = Path(tempfile.gettempdir()) / f"mla-sandbox-{owner}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == owner and not found.st_mode & 0o022:
            return path
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="mla-sandbox-"))
