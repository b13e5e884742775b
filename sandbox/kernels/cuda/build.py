"""Compiling many specialisations in parallel, into the cache that later runs read."""

import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from sandbox.kernels.cuda import nvrtc
from sandbox.kernels.cuda.host_runner import HostModule
from sandbox.kernels.cuda.kernel import Launch
from sandbox.kernels.cuda.source import CompileError


@dataclass(frozen=True)
class Built:
    """One finished build, the `done`-th of `total`; `error` is None when it compiled."""

    launch: Launch
    seconds: float
    error: CompileError | None
    done: int
    total: int


def prebuild(
    launches: Iterable[Launch], *, target: str, workers: int | None = None
) -> Iterator[Built]:
    """Compile what `launches` need for `target`: "host", "host-checked" or an architecture.

    What several launches share is compiled once. Gives each build when it is finished; with
    `workers` None as many run at a time as the process has CPUs. MissingDependency is raised.
    """
    unique = {_artefact(launch, target): launch for launch in launches}
    with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0))) as pool:
        waiting = [pool.submit(_build, launch, target) for launch in unique.values()]
        try:
            for done, future in enumerate(as_completed(waiting), 1):
                launch, seconds, error = future.result()
                yield Built(launch, seconds, error, done, len(waiting))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _artefact(launch: Launch, target: str) -> tuple:
    source = launch.kernel.source
    # A cubin holds all kernels of the file, a host module one.
    part = source.entry if target.startswith("host") else ""
    return source.path, part, tuple(launch.macros.items())


def _build(launch: Launch, target: str) -> tuple[Launch, float, CompileError | None]:
    source, macros = launch.kernel.source, launch.macros
    start = time.perf_counter()
    error = None
    try:
        if target in ("host", "host-checked"):
            HostModule(source, macros, checked=target == "host-checked")
        else:
            nvrtc.compile_cubin(source, macros, target)
    except CompileError as refused:
        error = refused
    return launch, time.perf_counter() - start, error
