"""CUDA sources: reading them, and compiling them for every architecture."""

import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from variants_here import needs_nvrtc

from sandbox.kernels.cuda import (
    ARCHITECTURES,
    CompileError,
    CudaKernel,
    MissingDependency,
    device_info,
    no_device_reason,
    source,
)
from sandbox.kernels.cuda.abi import macro_text
from sandbox.kernels.cuda.nvrtc import compile_cubin, device_arch
from sandbox.kernels.cuda.source import (
    KernelSource,
    Param,
    cuda_headers_hash,
    cuda_include_dirs,
    parse_signature,
)

KERNELS = Path(__file__).with_name("cuda_kernels")
BF16 = np.dtype(ml_dtypes.bfloat16)


SIGNATURE = """
#define LATER(a) \\
  extern "C" __global__ void later(int a)
// extern "C" __global__ void wanted(int commented_out);
__device__ void helper(int a) { wanted(1); }
extern "C" __global__ void before(int a) {}
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    wanted(const T* __restrict__ src,  // the source, (rows)
           __nv_bfloat16 *const out, unsigned long long n, /* ) */ const float by,
           const Pair<T, 8>* __restrict pairs, const __grid_constant__ struct Map map,
           int64_t const *p, void* any, float four[4], T** table) {}
__global__ void mangled(int a) {}
"""


def test_signature_is_read_from_the_text():
    assert parse_signature(SIGNATURE, "wanted") == (
        Param("src", "T", True, True),
        Param("out", "__nv_bfloat16", True, False),
        Param("n", "unsigned long long", False, False),
        Param("by", "float", False, True),
        Param("pairs", "Pair<T, 8>", True, True),
        Param("map", "Map", False, True),
        Param("p", "int64_t", True, True),
        Param("any", "void", True, False),
        Param("four", "float", True, False),
        Param("table", "T*", True, False),
    )
    assert parse_signature('extern "C" __global__ void none(void) {}', "none") == ()


@pytest.mark.parametrize(
    ("text", "entry", "message"),
    [
        (SIGNATURE, "wante", "no .* wante.*before, wanted"),
        (SIGNATURE, "helper", "no .* helper"),
        (SIGNATURE, "mangled", 'mangled must be declared extern "C"'),
        ('extern "C" __global__ void k(int) {}', "k", "k: cannot read the parameter 'int'"),
        ('extern "C" __global__ void k(int& a) {}', "k", "cannot read the parameter 'int& a'"),
        ('extern "C" __global__ void k(int a,\n#if X\nint b)\n#endif\n{}', "k", "preprocessor"),
        ('extern "C" __global__ void k(int a', "k", "not closed"),
    ],
)
def test_unreadable_signature_is_refused(text, entry, message):
    with pytest.raises(ValueError, match=message):
        parse_signature(text, entry)


def test_digest_follows_the_file_and_its_headers(copied):
    first = copied.digest()
    assert copied.digest() == first
    header = copied.path.with_name("factor.cuh")
    header.write_text("#pragma once\n#define FACTOR 3.0f\n")
    edited_header = copied.digest()
    copied.path.write_text(copied.path.read_text() + "\n")
    assert len({first, edited_header, copied.digest()}) == 3
    header.unlink()
    assert copied.system_includes() == ("cuda_bf16.h", "cuda_fp8.h", "factor.cuh")


KERNEL = 'extern "C" __global__ void k(int* out) { out[0] = VALUE; }\n'


def written(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_header_is_looked_for_beside_the_kernel_too(tmp_path):
    """When the header that includes it lies in another folder."""
    path = written(tmp_path / "one/k.cu", '#include "../two/shared.cuh"\n' + KERNEL)
    written(tmp_path / "two/shared.cuh", '#include "mine.cuh"\n#include "../one/mine.cuh"\n')
    written(tmp_path / "one/mine.cuh", "#define VALUE 1\n")
    first = KernelSource(path, "k").digest()
    written(tmp_path / "one/mine.cuh", "#define VALUE 2\n")
    assert KernelSource(path, "k").digest() != first
    assert KernelSource(path, "k").system_includes() == ()


def test_headers_are_those_beside_a_link(tmp_path):
    path = written(tmp_path / "one/k.cu", '#include "value.cuh"\n' + KERNEL)
    written(tmp_path / "one/value.cuh", "#define VALUE 1\n")
    written(tmp_path / "two/value.cuh", "#define VALUE 2\n")
    (tmp_path / "two/k.cu").symlink_to(path)
    (tmp_path / "three").symlink_to(tmp_path / "one")
    one, two, three = (
        KernelSource(tmp_path / name / "k.cu", "k") for name in ("one", "two", "three")
    )
    assert one.digest() != two.digest()
    assert one.digest() == three.digest()
    assert two.folder == tmp_path / "two"


def test_headers_that_end_each_other(tmp_path):
    path = written(tmp_path / "one/k.cu", '#include "a.cuh"\n' + KERNEL)
    written(tmp_path / "one/a.cuh", '#pragma once\n#include "../two/b.cuh"\n')
    written(tmp_path / "two/b.cuh", '#pragma once\n#include "../one/a.cuh"\n')
    assert KernelSource(path, "k").digest()


@pytest.mark.parametrize("line", ['/* */ #include "v.cuh"', '  #  include /* */ "v.cuh" // one'])
def test_comments_hide_no_header(tmp_path, line):
    path = written(tmp_path / "k.cu", f"{line}\n{KERNEL}")
    found = set()
    for value in (1, 2):
        written(tmp_path / "v.cuh", f"#define VALUE {value}\n")
        found.add(KernelSource(path, "k").digest())
    assert len(found) == 2


def test_what_is_no_include_is_none(tmp_path):
    text = '// #include "a.h"\n/*\n#include "b.h"\n*/\n#define include_all 1\n'
    source = KernelSource(written(tmp_path / "k.cu", text + KERNEL), "k")
    assert source.system_includes() == ()


def test_a_header_that_is_there_is_not_another_of_the_same_text(tmp_path):
    text = '#if __has_include("a.cuh")\n#include "a.cuh"\n#else\n#include "b.cuh"\n#endif\n'
    digests = set()
    for name in ("a", "b"):
        path = written(tmp_path / name / "k.cu", text + KERNEL)
        written(tmp_path / name / f"{name}.cuh", "#define VALUE 1\n")
        digests.add(KernelSource(path, "k").digest())
    assert len(digests) == 2


def test_a_header_that_a_macro_names_is_refused(tmp_path):
    path = written(tmp_path / "k.cu", '#define HEADER "v.cuh"\n#include HEADER\n' + KERNEL)
    with pytest.raises(ValueError, match="an #include names no header"):
        KernelSource(path, "k").digest()


@needs_nvrtc
def test_the_current_folder_holds_no_headers(tmp_path, monkeypatch):
    path = written(tmp_path / "one/k.cu", '#include "value.cuh"\n' + KERNEL)
    written(tmp_path / "one/value.cuh", f"#define VALUE 1 /* {tmp_path} */\n")
    written(tmp_path / "value.cuh", "#define VALUE nothing\n")
    monkeypatch.chdir(tmp_path)
    compile_cubin(KernelSource(path, "k"), {}, "sm_80")
    compile_cubin(KernelSource(Path("one/k.cu"), "k"), {"UNUSED": "1"}, "sm_80")


def test_headers_of_the_wanted_version_come_first(monkeypatch, tmp_path):
    sets = []
    for version in (13000, 12090):
        folder = tmp_path / str(version)
        (folder / "nv").mkdir(parents=True)
        for name in ("cuda_bf16.h", "cuda_fp8.h", "nv/target"):
            (folder / name).touch()
        (folder / "cuda.h").write_text(f"#define CUDA_VERSION {version}\n")
        sets.append([folder])
    incomplete = [tmp_path]
    monkeypatch.setattr(source, "_header_sets", lambda: iter([incomplete, *sets]))
    assert cuda_include_dirs(12) == sets[1]
    assert cuda_include_dirs(13) == sets[0]
    assert cuda_include_dirs(11) == sets[0]
    before = cuda_headers_hash(tuple(sets[0]))
    assert cuda_headers_hash(tuple(sets[1])) != before
    monkeypatch.setattr(source, "_header_sets", lambda: iter([incomplete]))
    with pytest.raises(MissingDependency, match=r"mla-sandbox\[host\]"):
        cuda_include_dirs()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"),
        (True, "1"),
        (np.bool_(False), "0"),
        (np.int64(-4), "-4"),
        (0.5, "0.5f"),
        (2.0, "2.0f"),
        (np.float32(1e-10), "1.000000013351432e-10f"),
        ("a + b", "a + b"),
        (np.float16, "__half"),
        (BF16, "__nv_bfloat16"),
        (ml_dtypes.float8_e4m3fn, "__nv_fp8_e4m3"),
        (np.dtype("uint8"), "unsigned char"),
        (np.dtype("int64"), "long long"),
    ],
)
def test_macro_values_as_c_text(value, text):
    assert macro_text("NAME", value) == text


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("A B", 1, ValueError),
        ("A", float("nan"), ValueError),
        ("A", "1\n2", ValueError),
        ("A", np.complex64, TypeError),
        ("A", None, TypeError),
        ("A", (1, 2), TypeError),
    ],
)
def test_macro_without_c_text_is_refused(name, value, error):
    with pytest.raises(error, match=name):
        macro_text(name, value)


@needs_nvrtc
@pytest.mark.usefixtures("fresh_cache")
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_for_every_architecture(scale, arch):
    found = scale.resources(arch, {"T": BF16})
    assert 8 <= found.registers <= 32
    assert (found.spill_stores, found.spill_loads, found.stack, found.static_shared) == (0,) * 4
    assert found.max_threads == 1024
    assert scale.unsupported(arch) is None


@needs_nvrtc
@pytest.mark.usefixtures("fresh_cache")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_spills_shared_memory_and_launch_bounds_are_reported(arch):
    spilling = CudaKernel(KERNELS / "spill.cu", "spill").resources(arch, {})
    assert spilling.registers in (32, 64)
    assert spilling.spill_stores >= 50
    assert spilling.spill_loads >= 50
    assert spilling.stack >= 50
    bounded = CudaKernel(KERNELS / "reverse.cu", "bounded").resources(arch, {})
    assert bounded.max_threads == 96
    assert bounded.static_shared in range(33 * 4, 33 * 4 + 16)
    assert bounded.spill_stores == 0


@needs_nvrtc
@pytest.mark.usefixtures("fresh_cache")
def test_edited_header_is_compiled_anew(copied):
    macros = {"T": "float"}
    first = compile_cubin(copied, macros, "sm_80")
    before = first.read_bytes()
    assert compile_cubin(copied, macros, "sm_80") == first
    copied.path.with_name("factor.cuh").write_text("#pragma once\n#define FACTOR 3.0f\n")
    assert compile_cubin(copied, macros, "sm_80").read_bytes() != before


@needs_nvrtc
def test_compile_error_names_file_line_and_macros(scale):
    with pytest.raises(
        CompileError, match=r"scale.cu does not compile for sm_80 \(T=Missing\)"
    ) as e:
        scale.resources("sm_80", {"T": "Missing"})
    assert 'scale.cu(7): error: identifier "Missing" is undefined' in e.value.log
    assert e.value.macros == {"T": "Missing"}


@needs_nvrtc
def test_unknown_architectures_are_refused_in_words(scale):
    with pytest.raises(MissingDependency, match=r"NVRTC \d+\.\d+ compiles for .* not for sm_999"):
        scale.resources("sm_999", {"T": "float"})
    assert "write sm_90" in scale.unsupported("90")
    hopper = CudaKernel(scale.source.path, "scale", min_cc=(9, 0), arch_specific=True)
    assert hopper.unsupported("sm_80") == "needs compute capability 9.0"
    assert hopper.unsupported("sm_90") == "needs the architecture-specific sm_90a"
    assert hopper.unsupported("sm_90a") is None


@needs_nvrtc
def test_device_architecture():
    assert device_arch((8, 0)) == "sm_80"
    assert device_arch((9, 0), arch_specific=True) == "sm_90a"
    assert device_arch((8, 6), arch_specific=True) == "sm_86"
    assert device_arch((12, 9)) in {"sm_120", "sm_121"}
    assert device_arch((99, 0)) == "sm_990"


WITHOUT_CUPY = """
import sys
import sandbox.kernels.cuda as cuda
assert "cupy" not in sys.modules, "imported cupy"
sys.modules["cupy"] = None
assert cuda.device_info() is None
assert "CuPy cannot be imported" in cuda.no_device_reason()
kernel = cuda.CudaKernel(sys.argv[1], "scale")
try:
    kernel.resources("sm_90", {"T": "float"})
except cuda.MissingDependency as missing:
    print(missing)
"""


def test_import_and_reasons_without_cupy():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT_CUPY, KERNELS / "scale.cu"],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "pip install" in done.stdout


def test_device_is_described_or_a_reason_given():
    info = device_info()
    assert (info is None) == (no_device_reason() is not None)
    if info is None:
        assert len(no_device_reason()) > 10
    else:
        assert info.cc >= (5, 0)
        assert info.shared_per_block >= 48 * 1024
