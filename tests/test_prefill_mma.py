"""The tensor-core prefill on every tiling, whatever the problem would get."""

import numpy as np
import pytest
from variants_here import needs_host

from sandbox.dims import PRESETS
from sandbox.kernels import OPS, conformance, specialisations
from sandbox.kernels.attention import prefill_cases, raw_prefill_mma
from sandbox.kernels.case import Case, Workload
from sandbox.kernels.case import dtypes as named
from sandbox.kernels.cuda import host_options, nvrtc

OP = OPS["prefill_attention"]
VARIANT = OP.variants["raw_mma"]
Tiling = raw_prefill_mma.Tiling
OTHERS = [(2, 4, 64, 1, 2), (2, 8, 64, 2, 1), (2, 8, 64, 2, 2)]
TILINGS = [*raw_prefill_mma.TILINGS, *(Tiling(*each) for each in OTHERS)]
ARCHITECTURES = ("sm_80", "sm_90")


def problems():
    bf16 = named("bfloat16")[0]
    ragged = Workload("ragged", (70, 0, 0, 3, 300), (90, 1, 0, 64, 40))
    wide = prefill_cases.WIDE_VALUES
    tiny = PRESETS["tiny"]
    yield Case(wide, "wide_values", bf16, ragged, {"spare": 5, "sharp": 8.0})
    yield Case(wide, "wide_values", bf16, ragged, {"causal": False, "views": True})
    yield Case(tiny, "tiny", bf16, ragged, {"fp8": True, "spare": 1, "views": True})


@needs_host
@pytest.mark.parametrize("tiling", TILINGS, ids=lambda t: "-".join(map(str, t)))
@pytest.mark.parametrize("case", list(problems()), ids=lambda case: case.name)
@pytest.mark.parametrize("checked", [False, True])
def test_every_tiling_computes_the_same(monkeypatch, tiling, case, checked):
    if case.options.get("fp8") and tiling.k_stages > 1:
        pytest.skip("codes have a second stage of their own")
    monkeypatch.setattr(raw_prefill_mma, "TILINGS", (tiling,))
    with host_options(checked=checked, seed=3 if checked else None, global_races=checked):
        outcome = conformance.run(OP, VARIANT, case, np)
    assert outcome.status == "PASSED", outcome.message


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("options", [{}, {"causal": False}, {"fp8": True}], ids=str)
def test_large_blocks_do_not_spill(monkeypatch, arch, options):
    """Many queries get them, which no problem has that a CPU could run."""
    try:
        if reason := nvrtc.unsupported(arch):
            pytest.skip(reason)
    except RuntimeError as missing:
        pytest.skip(str(missing))
    monkeypatch.setattr(raw_prefill_mma, "FEW_QUERIES", 0)
    monkeypatch.setattr(raw_prefill_mma, "FEW_BLOCKS", 0)
    workload = Workload("one", (1,), (1,))
    case = Case(PRESETS["deepseek_v3"], "deepseek_v3", named("bfloat16")[0], workload, options)
    (launch,) = specialisations.launches(OP, VARIANT, [case], arch)
    assert launch.macros["M_TILES"] == "2"
    used = launch.kernel.resources(arch, launch.macros)
    assert used.spill_stores == used.spill_loads == 0
    assert used.registers * launch.block[0] * int(launch.macros["BLOCKS_PER_SM"]) <= 65536
