"""Collectives through torch.distributed: processes over gloo, and over NCCL."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import collective_checks
import numpy as np
import pytest
from collective_checks import CHECKS, gpu_count

from sandbox.layers.collectives import Alone

pytest.importorskip("torch.distributed", reason="torch is not installed")

import torch.distributed as dist
import torch_ranks

from sandbox.layers import torch_collectives
from sandbox.layers.torch_collectives import TorchCollective

ROOT = Path(__file__).parent.parent


def torchrun(ranks: int, place: str) -> None:
    """Starts `torch_ranks.py`; its output stands in the error if a rank fails or hangs."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), torch_ranks.__file__, place]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun then ends its ranks
            output, _ = process.communicate(timeout=60)
            pytest.fail(f"the ranks did not end:\n{output}")
    assert process.returncode == 0, output
    for rank in range(ranks):
        for check in torch_ranks.CHECKS:
            assert f"rank {rank}: {check.__name__} passed" in output, output


def test_two_processes_over_gloo():
    torchrun(2, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(gpu_count() < 2, reason=f"{gpu_count()} CUDA devices; this needs two")
def test_processes_over_nccl():
    if not dist.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    torchrun(gpu_count(), "gpu")


@pytest.fixture
def gloo_world_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("gloo_world_of_one")
def test_torch_collective_of_one_process():
    collective = TorchCollective()
    assert (collective.rank, collective.world_size) == (0, 1)
    assert collective_checks.check_all(collective) == collective_checks.check_all(Alone())
    mine, out = np.arange(6, dtype=np.float32), np.empty((1, 6), np.float32)
    mine.flags.writeable = False
    collective.all_gather(mine, out)
    assert np.array_equal(out[0], mine)


@pytest.mark.usefixtures("gloo_world_of_one")
@pytest.mark.parametrize("name", CHECKS)
def test_empty_arrays_are_not_sent(name, monkeypatch):
    sent = []
    monkeypatch.setattr(torch_collectives, "_all_gather", lambda *_, **__: sent.append(1))
    monkeypatch.setattr(dist, "all_to_all_single", lambda *_, **__: sent.append(1))
    collective = TorchCollective()
    CHECKS[name](collective, (0, 5), "bfloat16")
    assert not sent
    with contextlib.suppress(AssertionError):
        CHECKS[name](collective, (3, 5), "bfloat16")
    assert sent


@pytest.mark.usefixtures("gloo_world_of_one")
def test_gloo_refuses_gpu_arrays():
    """CuPy arrays over host memory that nothing touches."""
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    memory = np.zeros(8, np.float32)
    unowned = cupy.cuda.UnownedMemory(memory.ctypes.data, memory.nbytes, memory, 0)
    array = cupy.ndarray(4, np.float32, cupy.cuda.MemoryPointer(unowned, 0))
    out = cupy.ndarray((1, 4), np.float32, cupy.cuda.MemoryPointer(unowned, 16))
    message = "array is on cuda, for which its group needs a backend such as nccl; it has gloo for"
    with pytest.raises(ValueError, match=message):
        TorchCollective().all_gather(array, out)
    with pytest.raises(ValueError, match="mixed devices: array is on cpu, out is on cuda:0"):
        TorchCollective().all_gather(memory[:4], out)


def test_torch_collective_needs_a_group():
    with pytest.raises(ValueError, match="init_process_group"):
        TorchCollective()
