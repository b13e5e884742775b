"""Collectives among processes, through torch.distributed."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from sandbox import arrays
from sandbox.layers.collectives import Collective
from sandbox.layers.queues import require_current_device

# Its name since torch 2.13, which warns of the old one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TorchCollective(Collective):
    """This process in a group: NCCL moves CuPy arrays, gloo (or MPI, UCC) NumPy arrays.

    Arrays cross as bytes, so that every dtype does whatever the backend knows. On a GPU nothing
    waits on the CPU; NCCL follows CuPy's current stream. Empty arrays are not sent. That all ranks
    make the same call with the same shape is not checked; ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` makes
    torch do so.

    Args:
        group: a process group; None is the default one.

    Raises:
        ValueError: torch.distributed is not initialised, or this process is not in the group; on
            a call, the group has no backend for the device of the arrays.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ValueError("group: this process is not one of its ranks")
        self.world_size = dist.get_world_size(group)
        backends = dist.get_backend_config(group)  # such as "cpu:gloo,cuda:nccl"
        self._backends = dict(pair.split(":") for pair in backends.split(","))

    def _exchange(self, call: str, array: Any, out: Any) -> None:
        on_gpu = arrays.is_gpu(array)
        self._require_backend("cuda" if on_gpu else "cpu")
        if not array.size:
            return
        stream: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if on_gpu:
            require_current_device(array)
            stream = arrays.torch_on_current_stream()
        move = _all_gather if call == "all_gather" else dist.all_to_all_single
        with stream:
            move(_as_bytes(out), _as_bytes(array), group=self.group)

    def _require_backend(self, device: str) -> None:
        backend = self._backends.get(device)
        if backend is None or (device == "cuda" and backend == "gloo"):  # which stops at the CPU
            have = ", ".join(f"{name} for {where}" for where, name in self._backends.items())
            want = "nccl" if device == "cuda" else "gloo"
            raise ValueError(
                f"array is on {device}, for which its group needs a backend such as {want}; "
                f"it has {have}"
            )


def _as_bytes(array: Any) -> torch.Tensor:
    return arrays.to_torch(array.reshape(-1).view(np.uint8))
