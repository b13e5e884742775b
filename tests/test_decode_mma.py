"""The tensor-core decode in every shape that a block may have, on the host runner."""

from dataclasses import replace

import numpy as np
import pytest
from variants_here import needs_host

from sandbox.dims import PRESETS
from sandbox.kernels import OPS, conformance, cuda, specialisations
from sandbox.kernels.attention import raw_decode_mma
from sandbox.kernels.attention.raw_decode_mma import SHAPES
from sandbox.kernels.case import Case, Workload
from sandbox.kernels.case import dtypes as named
from sandbox.kernels.cuda import nvrtc
from sandbox.kernels.cuda.device import SHARED_PER_BLOCK

OP = OPS["decode_attention"]
VARIANT = OP.variants["raw_mma"]


def problems():
    tiny = PRESETS["tiny"]
    (bf16,) = named("bfloat16")
    drafts = Workload("drafts", (150, 0, 0, 61), (30, 3, 0, 25))
    plain = {"block_size": 64}
    for options in ({}, {"tree": True, "sink": True}, {"splits": 3}, {"deterministic": True}):
        yield Case(tiny, "tiny", bf16, drafts, plain | options)
    yield Case(tiny, "tiny", bf16, drafts, {"block_size": 12, "window": 40})
    yield Case(tiny, "tiny", bf16, drafts, plain | {"format": "fp8_e4m3"})
    few = Workload("few", (90, 20), (2, 2))
    yield Case(replace(tiny, num_heads=40), "tiny_40", bf16, few, plain | {"topk": 70})


def shapes_and_cases():
    """The widest shape with everything, the others with a plain, a packed and a sparse cache."""
    every = list(problems())
    for shape in SHAPES:
        for case in every if shape is SHAPES[0] else (every[0], *every[-2:]):
            name = f"{shape.rows}x{shape.tokens}-{case.name}"
            yield pytest.param(shape, case, id=name)


@needs_host
@pytest.mark.parametrize(("shape", "case"), list(shapes_and_cases()))
def test_every_shape_computes_the_same(monkeypatch, shape, case):
    monkeypatch.setattr(raw_decode_mma, "SHAPES", (shape,))
    outcome = conformance.run(OP, VARIANT, case, np)
    assert outcome.passed, outcome.message


@needs_host
@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("shape", SHAPES[:2], ids=lambda s: f"{s.rows}x{s.tokens}")
def test_wide_blocks_pass_the_checked_build(monkeypatch, shape, seed):
    monkeypatch.setattr(raw_decode_mma, "SHAPES", (shape,))
    case = replace(next(iter(problems())), workload=Workload("short", (70, 3), (22, 1)))
    with cuda.host_options(checked=True, seed=seed, global_races=True):
        outcome = conformance.run(OP, VARIANT, case, np)
    assert outcome.passed, outcome.message


@pytest.mark.parametrize(
    ("arch", "rows", "tokens"),
    [("sm_80", 64, 32), ("sm_86", 16, 32), ("sm_90", 64, 64), ("sm_120", 16, 32)],
)
def test_a_gpu_gets_the_widest_shape_that_fits(arch, rows, tokens):
    case = Case(
        PRESETS["deepseek_v3"], "v3", *named("bfloat16"), Workload("one", (9,), (1,)),
        {"block_size": 64},
    )  # fmt: skip
    launch = specialisations.launches(OP, VARIANT, [case], arch)[0]
    assert (launch.macros["ROWS"], launch.macros["TOKENS"]) == (str(rows), str(tokens))
    assert launch.shared_bytes <= SHARED_PER_BLOCK[arch]


@pytest.mark.parametrize(
    ("arch", "options"),
    [("sm_80", {"format": "fp8_ds_mla"}), ("sm_90", {"deterministic": True})],
    ids=str,
)
def test_results_stay_in_registers(arch, options):
    """What spills is at most what is needed once a sequence; 64 results a thread would be 256."""
    try:
        if reason := nvrtc.unsupported(arch):
            pytest.skip(reason)
    except RuntimeError as missing:
        pytest.skip(str(missing))
    case = Case(
        PRESETS["deepseek_v3"], "v3", *named("bfloat16"), Workload("one", (90,), (1,)),
        {"block_size": 64, **options},
    )  # fmt: skip
    launch = specialisations.launches(OP, VARIANT, [case], arch)[0]
    used = launch.kernel.resources(arch, launch.macros)
    assert max(used.spill_stores, used.spill_loads) <= 128
