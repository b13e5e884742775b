"""Checks under every rank of a torch.distributed world; torchrun starts this file.

``torch_ranks.py cpu`` runs them over gloo, ``torch_ranks.py gpu`` over NCCL, a GPU a rank. Each
function of `CHECKS` is called with the rank's collective and the namespace of its arrays.
"""

from __future__ import annotations

import datetime
import os
import sys
import warnings
from typing import Any

import collective_checks
import numpy as np
import pytest
import torch
import torch.distributed as dist
from layer_checks import a_layer_over_ranks

from sandbox.layers.collectives import Collective, InProcess
from sandbox.layers.torch_collectives import TorchCollective


def same_as_in_process(collective: Collective, xp: Any) -> None:
    threads = InProcess(collective.world_size).run(collective_checks.check_all)
    assert collective_checks.check_all(collective, xp) == threads[collective.rank]


def groups_have_ranks_of_their_own(collective: Collective, xp: Any) -> None:
    last = collective.world_size - 1
    group = dist.new_group([last])
    if collective.rank == last:
        mine = TorchCollective(group)
        assert (mine.rank, mine.world_size) == (0, 1)
        collective_checks.check_all(mine, xp)
    else:
        with pytest.raises(ValueError, match="group: this process is not one of its ranks"):
            TorchCollective(group)


CHECKS = [
    same_as_in_process,
    groups_have_ranks_of_their_own,
    collective_checks.check_later_work,
    a_layer_over_ranks,
]


def main(place: str) -> None:
    warnings.simplefilter("error", FutureWarning)
    xp: Any = np
    if place == "gpu":
        import cupy as xp

        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        xp.cuda.Stream(non_blocking=True).use()
    backend = "nccl" if place == "gpu" else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=60))
    collective = TorchCollective()
    for check in CHECKS:
        check(collective, xp)
        print(f"rank {collective.rank}: {check.__name__} passed", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
