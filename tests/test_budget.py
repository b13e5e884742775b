"""Every kernel compiles for every architecture and keeps everything in registers."""

import pytest

from sandbox.kernels import OPS, specialisations
from sandbox.kernels.cuda import ARCHITECTURES, nvrtc

RAW = [
    pytest.param(op, variant, id=f"{op.name}-{variant.name}")
    for op in OPS.values()
    for variant in op.variants.values()
    if variant.kind == "cuda"
]


def representative(op):
    """One small odd problem and one of a real model's dims: the extremes of the macros."""
    cases = [case for case in op.cases("conformance") if case.dtype.name == "bfloat16"]
    tiny = next(case for case in cases if case.dims_name == "tiny")
    return [tiny, next(case for case in cases if case.dims_name == "deepseek_v3")]


@pytest.mark.parametrize(("op", "variant"), RAW)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_without_spills(op, variant, arch):
    try:
        if reason := nvrtc.unsupported(arch):
            pytest.skip(reason)
    except RuntimeError as missing:
        pytest.skip(str(missing))
    found = specialisations.launches(op, variant, representative(op))
    assert found
    for launch in found:
        if launch.kernel.unsupported(arch):
            continue
        used = launch.kernel.resources(arch, launch.macros)
        assert used.spill_stores == used.spill_loads == 0, (launch.macros, used)
        threads = launch.block[0] * launch.block[1] * launch.block[2]
        assert used.registers * threads <= 65536
        assert used.static_shared <= 48 * 1024
