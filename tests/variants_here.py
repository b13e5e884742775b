"""What runs on this machine's CPU: an op's variants, the host runner, NVRTC. What needs a GPU is
marked `gpu`, which skips it (conftest.py) where there is none."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from sandbox.kernels.cuda import MissingDependency
from sandbox.kernels.cuda.host_runner import unavailable_reason
from sandbox.kernels.cuda.nvrtc import nvrtc_version
from sandbox.kernels.op import Op


def unless(reason: str | None) -> list[pytest.MarkDecorator]:
    """Marks that skip for `reason`; none without one."""
    return [pytest.mark.skip(reason=reason)] if reason else []


def here(op: Op, kinds: Collection[str] | None = None, but: Collection[str] = ()) -> list[Any]:
    """Parameters: names of the op's variants, each skipped with its reason where it cannot run.

    Only those of `kinds`, and none named in `but`.
    """
    return [
        pytest.param(name, id=name, marks=unless(variant.unavailable(variant.target(gpu=False))))
        for name, variant in op.variants.items()
        if (kinds is None or variant.kind in kinds) and name not in but
    ]


def all_here(
    *ops: Op, kinds: Collection[str] | None = None, but: Collection[str] = ()
) -> list[Any]:
    """Parameters: pairs of an op and a name that `here` gives."""
    return [
        pytest.param(op, *each.values, id=f"{op.name}-{each.id}", marks=each.marks)
        for op in ops
        for each in here(op, kinds, but)
    ]


def _nvrtc_missing() -> str | None:
    try:
        nvrtc_version()
    except MissingDependency as missing:
        return str(missing)
    return None


needs_host = pytest.mark.skipif(unavailable_reason() is not None, reason=f"{unavailable_reason()}")
needs_nvrtc = pytest.mark.skipif(_nvrtc_missing() is not None, reason=f"{_nvrtc_missing()}")
