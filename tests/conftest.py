"""Fixtures that several test files use."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from sandbox.kernels import Unavailable
from sandbox.kernels.cuda import CudaKernel, no_device_reason
from sandbox.kernels.cuda.source import KernelSource

KERNELS = Path(__file__).with_name("cuda_kernels")

os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", ".hypothesis")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """A variant may refuse a problem, with the reason: any test of it is then skipped."""
    try:
        return (yield)
    except Unavailable as refusal:
        pytest.skip(str(refusal))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """A test marked `gpu` is skipped, with the reason, where there is no GPU."""
    if item.get_closest_marker("gpu") and (reason := no_device_reason()):
        pytest.skip(reason)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def torch():
    """torch, without which the test is skipped."""
    return pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture
def scale() -> CudaKernel:
    return CudaKernel(KERNELS / "scale.cu", "scale")


@pytest.fixture
def copied(tmp_path) -> KernelSource:
    """`scale.cu` and its header where they can be edited."""
    for name in ("scale.cu", "factor.cuh"):
        shutil.copy(KERNELS / name, tmp_path)
    return KernelSource(tmp_path / "scale.cu", "scale")


@pytest.fixture
def fresh_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MLA_SANDBOX_CACHE", str(tmp_path / "cache"))
