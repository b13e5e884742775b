"""Calling a kernel of a `.cu` file: on the GPU when its arrays are CuPy's, on the host runner when
they are NumPy's."""

import operator
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from sandbox.kernels.cuda import nvrtc
from sandbox.kernels.cuda.abi import Argument, MacroValue, argument, macro_text, place
from sandbox.kernels.cuda.gpu import GpuFunction
from sandbox.kernels.cuda.host_runner import (
    MAX_BLOCK_THREADS,
    MAX_GRID,
    MAX_SHARED_BYTES,
    HostModule,
)
from sandbox.kernels.cuda.source import KernelSource

Dimensions = int | tuple[int, ...]
Dim3 = tuple[int, int, int]

# With this set, an edited file or header is noticed at the next call of a running process.
_RELOAD = os.environ.get("MLA_SANDBOX_RELOAD", "") not in ("", "0")

_MAX_BLOCK = (1024, 1024, 64)
_NO_MACROS: Mapping[str, MacroValue] = MappingProxyType({})


class CudaKernel:
    """One `extern "C" __global__` function of a `.cu` file, specialised by compile-time macros.

    `min_cc` is the least compute capability it needs; `arch_specific` says that it uses what only
    one architecture has, such as wgmma, and must be compiled for `sm_90a` and its like. `overlap`
    lets its blocks come up while the kernel before it ends, where the GPU can (sm_90 and newer);
    its first statement must then be `wait_for_previous_kernel()` of `overlap.cuh`.
    """

    def __init__(
        self,
        path: str | Path,
        entry: str,
        *,
        min_cc: tuple[int, int] = (7, 5),
        arch_specific: bool = False,
        overlap: bool = False,
    ):
        self.source = KernelSource(Path(path), entry)
        self.min_cc = min_cc
        self.arch_specific = arch_specific
        self.overlap = overlap
        self._specialisations: dict[tuple, _Specialisation] = {}

    def __repr__(self) -> str:
        return f"CudaKernel({self.source.path.name}:{self.source.entry})"

    def __call__(
        self,
        grid: Dimensions,
        block: Dimensions,
        *arguments: object,
        macros: Mapping[str, MacroValue] = _NO_MACROS,
        shared_bytes: int = 0,
    ) -> None:
        """Launch `grid` blocks of `block` threads, on a GPU on CuPy's current stream.

        `arguments` follow the C signature: for a pointer an array (all NumPy or all CuPy, any
        strides: only its address is passed) or None for null; for a value a Python or NumPy
        number, converted to the parameter's type; for a struct `bytes` or a NumPy record.
        `macros` become `#define`s: numbers, C text, and dtypes as their C type. `shared_bytes` is
        dynamic shared memory a block. A grid with a zero launches nothing.

        Raises TypeError and ValueError, before any launch, for what does not fit the signature or
        a limit; CompileError, MissingDependency, and the host runner's KernelFault.
        """
        special = self._specialise(macros)
        device = place(special.arguments, arguments)
        grid = _dimensions("grid", grid, 0, MAX_GRID)
        block = _dimensions("block", block, 1, _MAX_BLOCK)
        if block[0] * block[1] * block[2] > MAX_BLOCK_THREADS:
            raise ValueError(f"block: {block} has more than {MAX_BLOCK_THREADS} threads")
        if not 0 <= shared_bytes <= MAX_SHARED_BYTES:
            raise ValueError(
                f"shared_bytes: {shared_bytes} is not within 0 and {MAX_SHARED_BYTES}, "
                "the most that any GPU gives a block"
            )
        pairs = zip(special.arguments, arguments, strict=True)
        if device is None:
            values = [each.host(value) for each, value in pairs]
        else:
            values = [each.gpu(value) for each, value in pairs]
        if 0 in grid:
            return
        recorder = _RECORDER.get()
        if recorder is not None:
            recorder.append(Launch(self, special.macros, grid, block, shared_bytes))
        elif device is None:
            options = _HOST_OPTIONS.get()
            module = self._host_module(special, options.checked)
            module.launch(
                grid,
                block,
                values,
                shared_bytes=shared_bytes,
                seed=options.seed,
                global_races=options.global_races,
            )
        else:
            self._gpu_function(special, device).launch(grid, block, values, shared_bytes)

    def resources(self, arch: str, macros: Mapping[str, MacroValue]) -> nvrtc.Resources:
        """Registers, spills, stack and shared memory when compiled for `arch`; needs no GPU."""
        return nvrtc.resources(self.source, self._specialise(macros).macros, arch)

    def unsupported(self, arch: str) -> str | None:
        """Why it cannot be compiled for `arch` ("sm_80"), or None when it can."""
        if reason := nvrtc.unsupported(arch):
            return reason
        number = int(arch.removeprefix("sm_").rstrip("af"))
        if divmod(number, 10) < self.min_cc:
            return f"needs compute capability {self.min_cc[0]}.{self.min_cc[1]}"
        if self.arch_specific and number >= 90 and not arch.endswith("a"):
            return f"needs the architecture-specific {arch}a"
        return None

    def _specialise(self, macros: Mapping[str, MacroValue]) -> "_Specialisation":
        key = (*macros.items(), *map(type, macros.values()))  # 1, True and 1.0 are equal keys
        special = self._specialisations.get(key)
        if special is None or (_RELOAD and special.digest != self.source.digest()):
            text = {name: macro_text(name, macros[name]) for name in sorted(macros)}
            arguments = tuple(argument(param, text) for param in self.source.params)
            special = _Specialisation(text, self.source.digest(), arguments)
            self._specialisations[key] = special
        return special

    def _host_module(self, special: "_Specialisation", checked: bool) -> HostModule:
        module = special.host.get(checked)
        if module is None:
            module = special.host[checked] = HostModule(
                self.source, special.macros, checked=checked
            )
        return module

    def _gpu_function(self, special: "_Specialisation", device: int) -> GpuFunction:
        function = special.gpu.get(device)
        if function is None:
            function = special.gpu[device] = GpuFunction(
                self.source,
                special.macros,
                special.arguments,
                device,
                min_cc=self.min_cc,
                arch_specific=self.arch_specific,
                overlap=self.overlap,
            )
        return function


@dataclass
class _Specialisation:
    macros: dict[str, str]
    digest: str
    arguments: tuple[Argument, ...]
    host: dict[bool, HostModule] = field(default_factory=dict)  # by `checked`
    gpu: dict[int, GpuFunction] = field(default_factory=dict)  # by device


@dataclass(frozen=True)
class Launch:
    """A recorded call; `macros` are C text, `grid` and `block` have three numbers."""

    kernel: CudaKernel
    macros: Mapping[str, str]
    grid: Dim3
    block: Dim3
    shared_bytes: int


_RECORDER: ContextVar[list[Launch] | None] = ContextVar("recorder", default=None)


@contextmanager
def record_launches() -> Iterator[list[Launch]]:
    """Inside it kernels are checked and recorded in the list, not compiled and not run."""
    launches: list[Launch] = []
    token = _RECORDER.set(launches)
    try:
        yield launches
    finally:
        _RECORDER.reset(token)


@dataclass(frozen=True)
class _HostOptions:
    checked: bool = False
    seed: int | None = None
    global_races: bool = False


_PLAIN = _HostOptions()
_HOST_OPTIONS: ContextVar[_HostOptions] = ContextVar("host_options", default=_PLAIN)


@contextmanager
def host_options(
    *, checked: bool = False, seed: int | None = None, global_races: bool = False
) -> Iterator[None]:
    """Inside it the host runner uses its checked build (sanitizers), or a schedule of blocks and
    threads shuffled by `seed`; `global_races` makes the checked build also forbid that two threads
    write one byte of an argument."""
    token = _HOST_OPTIONS.set(_HostOptions(checked, seed, global_races))
    try:
        yield
    finally:
        _HOST_OPTIONS.reset(token)


def _dimensions(name: str, given: Dimensions, least: int, most: Dim3) -> Dim3:
    if type(given) is int and least <= given <= most[0]:
        return given, 1, 1
    written = given if isinstance(given, tuple) else (given,)
    try:
        x, y, z = (*map(operator.index, written), 1, 1)[: max(3, len(written))]
    except (TypeError, ValueError):
        raise TypeError(f"{name}: expected an int or up to three ints, got {given!r}") from None
    if not (least <= x <= most[0] and least <= y <= most[1] and least <= z <= most[2]):
        raise ValueError(f"{name}: {given} is not within {least} and {most}")
    return x, y, z
