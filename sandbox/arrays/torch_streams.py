"""torch on the stream that is CuPy's current one."""

from __future__ import annotations

import contextlib
from typing import Any

from sandbox.arrays.adopted import import_cupy
from sandbox.arrays.streams import current_stream_pointer


def torch_has_cuda() -> bool:
    """Whether the installed torch can use a GPU here."""
    import torch

    return torch.cuda.is_available()


def torch_on_current_stream() -> contextlib.AbstractContextManager[Any]:
    """Makes CuPy's current stream torch's current one as well."""
    import torch

    device = import_cupy().cuda.runtime.getDevice()
    pointer = current_stream_pointer()
    if not pointer:  # ExternalStream(0) would be a new stream, not the default one
        return torch.cuda.stream(torch.cuda.default_stream(device))
    return torch.cuda.stream(torch.cuda.ExternalStream(pointer, device=device))
