"""No kernel computes in double precision, which a GPU does at a fraction of float32's rate."""

import pytest
from variants_here import needs_nvrtc

from sandbox.kernels import OPS, specialisations
from sandbox.kernels.cuda import source

RAW = [
    pytest.param(op, variant, id=f"{op.name}-{variant.name}")
    for op in OPS.values()
    for variant in op.variants.values()
    if variant.kind == "cuda"
]


def one_case_a_format(op):
    found = {}
    for case in op.cases("conformance"):
        if case.dtype.name == "bfloat16":
            found.setdefault((case.format.name, "scale" in case.options), case)
    return found.values()


def ptx(launch, arch):
    from cupy.cuda import nvrtc

    path = launch.kernel.source.path
    macros = "".join(f"#define {name} {text}\n" for name, text in launch.macros.items())
    folders = [path.parent, source.include_dir(), *source.cuda_include_dirs()]
    program = nvrtc.createProgram(macros + path.read_text(), path.name, (), ())
    options = [f"-arch={arch.replace('sm', 'compute')}", "-std=c++17", "-default-device"]
    nvrtc.compileProgram(program, [*options, *(f"-I{folder}" for folder in folders)])
    return nvrtc.getPTX(program).decode()


def launches(op, variant, arch):
    found = specialisations.launches(op, variant, one_case_a_format(op), arch)
    return [(launch, arch) for launch in found if not launch.kernel.unsupported(arch)]


@needs_nvrtc
@pytest.mark.parametrize(("op", "variant"), RAW)
def test_computes_nothing_in_double_precision(op, variant):
    # sm_80 has no instructions for 8-bit floats; without them CUDA's own conversions go by double.
    found = launches(op, variant, "sm_80") or launches(op, variant, "sm_90a")
    assert found
    for launch, arch in found:
        text = ptx(launch, arch)
        assert f".entry {launch.kernel.source.entry}" in text
        assert ".f64" not in text, launch.macros
