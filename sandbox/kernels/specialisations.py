"""Which kernels the raw variants would launch, found by recording their launches."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from sandbox.kernels import conformance
from sandbox.kernels.case import Case
from sandbox.kernels.cuda import Launch, record_launches
from sandbox.kernels.cuda.device import planned_for
from sandbox.kernels.op import Op, Variant


def representative(op: Op, dims_name: str, formats: Iterable[str]) -> list[Case]:
    """The op's bfloat16 cases with these dims and one of these cache formats, but for large ones.

    Some may launch the same kernels.
    """
    wanted = set(formats)
    cases = [*op.cases("conformance"), *op.cases("compare")]
    return [
        case
        for case in cases
        if case.dims_name == dims_name
        and case.dtype.name == "bfloat16"
        and case.format.name in wanted
        and case.size != "large"
    ]


def launches(op: Op, variant: Variant, cases: Iterable[Case], arch: str = "sm_90") -> list[Launch]:
    """The different kernels, by source and macros, that `variant` launches on `cases` for a GPU of
    `arch`.

    Nothing runs: the cases' arrays live in CPU memory and the launches are only recorded.
    """
    found: dict[tuple, Launch] = {}
    if variant.kind != "cuda":
        return []
    for case in cases:
        arguments = conformance.checked_arguments(op, conformance.prepare(op, case, np))
        with planned_for(arch), record_launches() as recorded:
            if not variant.refuses(arguments):
                variant.run(**arguments)
        for launch in recorded:
            found.setdefault((launch.kernel, *sorted(launch.macros.items())), launch)
    return list(found.values())
