"""Every kernel compiles for every architecture and keeps everything in registers."""

import functools
import json

import pytest
from typer.testing import CliRunner

from experiments.__main__ import app
from sandbox.cache_formats import FORMATS
from sandbox.kernels import OPS, specialisations
from sandbox.kernels.cuda import ARCHITECTURES, nvrtc, prebuild

PACKED = [fmt.name for fmt in FORMATS.values() if fmt.packed]
TELLING = ("sm_75", "sm_90", "sm_120")
"""Without instructions for 8-bit floats, and with them: packed formats are compiled for these."""

RAW = [
    pytest.param(op, variant, id=f"{op.name}-{variant.name}")
    for op in OPS.values()
    for variant in op.variants.values()
    if variant.kind == "cuda"
]


SPILLED = {"decode_mma": 128}
"""Bytes that a kernel may keep in local memory: what it needs once a sequence, not once a tile."""


@functools.cache
def launches(op, variant, packed, arch):
    """One small odd problem and a real model's, the extremes of the macros; or all packed ones of
    that model."""
    cases = specialisations.representative(op, "deepseek_v3", PACKED if packed else ["bfloat16"])
    if not packed:
        cases += specialisations.representative(op, "tiny", ["bfloat16"])[:1]
    return specialisations.launches(op, variant, cases, arch)


def wanted(op, variant, arch):
    found = [
        *launches(op, variant, False, arch),
        *(launches(op, variant, True, arch) if arch in TELLING else ()),
    ]
    return [
        launch
        for launch in found
        if not launch.kernel.unsupported(arch)
        and (launch.kernel.arch_specific or not arch.endswith("a"))  # else as for the plain one
    ]


@pytest.fixture(scope="module")
def compiled(request):
    """What the chosen tests ask for is in the cache: compiled several at a time."""
    try:
        architectures = [arch for arch in ARCHITECTURES if not nvrtc.unsupported(arch)]
    except RuntimeError as missing:
        pytest.skip(str(missing))
    asked = [item.callspec.params for item in request.session.items if compiled_by(item)]
    for arch in architectures:
        kernels = [
            each for p in asked if p["arch"] == arch for each in wanted(p["op"], p["variant"], arch)
        ]
        for _ in prebuild(kernels, target=arch):
            pass


def compiled_by(item):
    return "compiled" in getattr(item, "fixturenames", ())


@pytest.mark.parametrize(("op", "variant"), RAW)
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.usefixtures("compiled")
def test_compiles_without_spills(op, variant, arch):
    if reason := nvrtc.unsupported(arch):
        pytest.skip(reason)
    if not (launches(op, variant, False, arch) or launches(op, variant, True, arch)):
        pytest.skip("takes none of the bf16 problems that are compiled here")
    found = wanted(op, variant, arch)
    if not found:
        pytest.skip("no kernel is for this architecture alone")
    for launch in found:
        used = launch.kernel.resources(arch, launch.macros)
        allowed = SPILLED.get(launch.kernel.source.entry, 0)
        assert max(used.spill_stores, used.spill_loads) <= allowed, (launch.macros, used)
        threads = launch.block[0] * launch.block[1] * launch.block[2]
        assert used.registers * threads <= 65536
        assert used.static_shared <= 48 * 1024


def test_resources_has_a_line_for_each_kernel_and_format():
    words = ["resources", "gather", "--dims", "deepseek_v3", "--arch", "sm_75,sm_90"]
    words += ["--format", "bfloat16,fp8_e4m3"]
    made = CliRunner().invoke(app, [*words, "--json"])
    if made.exit_code == 2:
        pytest.skip(made.output)
    rows = json.loads(made.output)
    raw = {name for name, variant in OPS["gather"].variants.items() if variant.kind == "cuda"}
    assert {row["variant"] for row in rows} == raw
    assert {(row["format"], row["arch"]) for row in rows if row["variant"] == "raw_tile"} == {
        (name, arch) for name in ("bfloat16", "fp8_e4m3") for arch in ("sm_75", "sm_90")
    }
    text = CliRunner().invoke(app, words).output
    assert max(map(len, text.splitlines())) <= 80
    for row in rows:
        assert f"gather {row['variant']}: {row['kernel']}\n" in text


def test_resources_says_when_no_kernel_has_such_a_case():
    made = CliRunner().invoke(app, ["resources", "gather", "--format", "fp8_ds_mla"])
    assert made.exit_code == 2
