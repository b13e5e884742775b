"""Kernels of tests/kernels on the host runner."""

import ctypes
from pathlib import Path

import pytest

from sandbox.kernels.cuda.host_runner import HostModule
from sandbox.kernels.cuda.source import KernelSource

KERNELS = Path(__file__).with_name("kernels")

both_builds = pytest.mark.parametrize("checked", [False, True], ids=["plain", "checked"])


def module(file: str, entry: str, *, checked: bool = True, **macros: str) -> HostModule:
    macros = {"ELEMENT": "float", **macros} if file == "features.cu" else macros
    return HostModule(KernelSource(KERNELS / file, entry), macros, checked=checked)


def launch(kernel: HostModule, grid, block, *arguments, **options) -> None:
    """Ints become C ints, tuples get three numbers."""
    arguments = [ctypes.c_int(a) if isinstance(a, int) else a for a in arguments]
    kernel.launch((*grid, 1, 1)[:3], (*block, 1, 1)[:3], arguments, **options)
