"""The host runner: CUDA C++ compiled and run on the CPU."""

import ctypes
import math
import struct
import subprocess
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from host_launch import KERNELS, both_builds, launch, module
from variants_here import needs_host

from sandbox.kernels.cuda import host_runner
from sandbox.kernels.cuda.host_runner import HostModule, unavailable_reason
from sandbox.kernels.cuda.source import CompileError, KernelSource, MissingDependency

BF16 = np.dtype(ml_dtypes.bfloat16)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)

pytestmark = needs_host


@both_builds
@pytest.mark.parametrize("seed", [None, 3])
def test_indices(checked, seed):
    grid, block = (3, 2, 4), (5, 3, 2)
    out = np.full(math.prod(grid) * math.prod(block), -1, np.int32)
    launch(module("features.cu", "indices", checked=checked), grid, block, out, seed=seed)
    z, y, x = np.indices(block[::-1]).reshape(3, 1, -1)
    blocks = np.arange(math.prod(grid))[:, None]
    np.testing.assert_array_equal(out, (1000000 * blocks + 10000 * x + 100 * y + z).ravel())


@pytest.mark.parametrize(
    ("element", "dtype"),
    [
        ("unsigned char", np.uint8),
        ("__nv_bfloat16", BF16),
        ("float", np.float32),
        ("double", float),
    ],
)
def test_shuffles(element, dtype):
    kernel = module("features.cu", "shuffles", checked=False, ELEMENT=element)
    values = np.arange(100, 164).astype(dtype)
    lanes = np.arange(64)
    for width in (32, 8):
        out = np.zeros((4, 64), dtype)
        launch(kernel, (1,), (64,), out, values, width)
        first = lanes // width * width
        up, down, across = lanes - 2, lanes + 2, lanes ^ 5
        sources = [
            first + (lanes + 3) % width,
            np.where(up < first, lanes, up),
            np.where(down >= first + width, lanes, down),
            across,
        ]
        np.testing.assert_array_equal(out, values[np.stack(sources)])


@both_builds
@pytest.mark.parametrize("seed", [None, 8])
def test_votes(checked, seed):
    values = np.random.default_rng(0).integers(-6, 7, 64).astype(np.int32)
    values[16:32] = 3
    out = np.zeros((13, 64), np.uint32)
    kernel = module("features.cu", "votes", checked=checked)
    launch(kernel, (1,), (64,), out, values, seed=seed)
    halves = values.reshape(4, 16)
    place = np.arange(64).reshape(4, 16) % 32
    mask = (1 << place).sum(1)

    def spread(rows: np.ndarray) -> np.ndarray:
        return np.broadcast_to(rows.astype(np.uint32)[:, None], (4, 16)).ravel()

    same = (halves == halves[:, :1]).all(1)
    equal = halves[:, :, None] == halves[:, None, :]
    expected = [
        spread(((halves > 0) << place).sum(1)),
        spread((halves > 5).any(1)),
        spread((halves > -5).all(1)),
        spread(halves.sum(1)),
        spread(halves.min(1)),
        spread(halves.astype(np.uint32).max(1)),
        ((equal << place[:, None, :]).sum(2)).astype(np.uint32).ravel(),
        spread(np.where(same, mask, 0)),
        spread(same),
        np.full(64, (values > 0).sum()),
        np.full(64, (values > -5).all()),
        np.full(64, (values > 5).any()),
        np.full(64, 0xFFFFFFFF),
    ]
    np.testing.assert_array_equal(out, np.stack(expected).astype(np.uint32))


@both_builds
def test_atomics(checked):
    blocks, threads = (40, 64) if checked else (4000, 64)
    count = blocks * threads
    integers = np.array([0, count, 99, -1, -1, 0, 0, 0, 0, 0], np.int32)
    wide, single, double = np.zeros(2, np.uint64), np.zeros(1, np.float32), np.zeros(1)
    half, bf16 = np.zeros(1, np.float16), np.zeros(1, BF16)
    arrays = (integers, wide, single, double, half, bf16)
    launch(module("features.cu", "atomics", checked=checked), (blocks,), (threads,), *arrays)
    total = np.arange(count, dtype=np.int64).sum().astype(np.int32)
    xor = np.bitwise_xor.reduce(np.arange(count))
    last = count - 1
    expected = [total, 0, 0, last, 0, -1, xor, count % 7, last, 42]
    np.testing.assert_array_equal(integers, expected)
    assert wide.tolist() == [count << 33, last << 40]
    assert (single[0], double[0], half[0], float(bf16[0])) == (count / 2, count / 4, 32, 32)


@both_builds
@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("threads", [32, 256])
def test_shared_memory(checked, seed, threads):
    columns = 300
    rows = np.random.default_rng(0).integers(-9, 9, (5, columns)).astype(np.float32)
    sums = np.full((5, 4), np.nan, np.float32)
    kernel = module("features.cu", "row_sums", checked=checked)
    arguments = (sums, rows, columns)
    launch(kernel, (5,), (threads,), *arguments, shared_bytes=4 * columns, seed=seed)
    total = rows.sum(1)
    expected = np.stack([total, 2 * total, rows[:, :4].sum(1), np.full(5, 3)], 1)
    np.testing.assert_array_equal(sums, expected)


@both_builds
def test_passing(checked):
    vector = np.array([1, 2, 3, 4], np.float32)
    out = np.zeros(7)
    out[4] = 10
    scale = struct.pack("fid", 1.5, 4, 0.125)
    rest = [ctypes.c_bool(True), ctypes.c_longlong(1 << 40)]
    kernel = module("features.cu", "passing", checked=checked)
    launch(kernel, (1,), (1,), out, vector, None, scale, *rest)
    second = vector.view(np.uint16)[:2].view(BF16)[1]
    assert out.tolist() == [4321, 24.125, 1, 5, 10 + 2**40, 5.5, float(second)]
    with pytest.raises(TypeError, match="scale: 12 bytes given, Scale has 16"):
        launch(kernel, (1,), (1,), out, vector, None, scale[:12], *rest)
    with pytest.raises(TypeError, match="flag: cannot pass int64 as bool"):
        launch(kernel, (1,), (1,), out, vector, None, scale, np.int64(1), rest[1])


def test_float_intrinsics():
    x = np.array([0.3, -1.75, 2.0, 1e-3, -40.0, 0.998, np.inf, np.nan], np.float32)
    out = np.zeros((19, x.size), np.float32)
    launch(
        module("features.cu", "float_intrinsics", checked=False), (1,), (x.size,), out, x, x.size
    )
    wide = x.astype(np.float64)
    size = np.abs(wide)
    with np.errstate(all="ignore"):
        error = np.array([math.erf(value) for value in wide])
        half, b = x.astype(np.float16).astype(float), x.astype(BF16).astype(float)
        expected = [
            *(np.exp(wide), np.exp2(wide), np.log(size), np.log2(size), size**-0.5),
            *(1 / wide, 1 / wide, wide * wide - 1),
            x * x - np.float32(1),
            np.where(np.isnan(x), 0, np.clip(wide, 0, 1)),
            size,
            np.tanh(wide) + error,
            np.isnan(x) + 2 * np.isinf(x),
            *(b, half),
            np.clip(x, -448, 448).astype(FP8).astype(float),
            (b * b + 1).astype(BF16).astype(float),
            (half * 2 + 1).astype(np.float16).astype(float),
            np.exp((np.float32(0.25) * x).astype(BF16).astype(float)).astype(BF16).astype(float),
        ]
    np.testing.assert_allclose(out, np.stack(expected), rtol=3e-7, atol=1e-38)


def test_integer_intrinsics():
    x = np.array([0, 1, -1, 0x01234567, -0x12345678, 1 << 30], np.int32)
    reals = np.array([2.5, -3.5, 3e9, np.nan, -0.2, 7.0], np.float32)
    out = np.zeros((13, x.size), np.int32)
    kernel = module("features.cu", "integer_intrinsics", checked=False)
    launch(kernel, (1,), (x.size,), out, x, reals, x.size)

    def signed(value: int) -> int:
        return (value + 2**31) % 2**32 - 2**31

    def bytes_of(value: int) -> bytes:
        return struct.pack("<I", value % 2**32)

    columns = []
    for value in map(int, x):
        bits = value % 2**32
        both = bytes_of(value) + bytes_of(0x89ABCDEF)
        columns.append(
            [
                bits.bit_count(),
                32 - bits.bit_length(),
                (bits & -bits).bit_length(),
                signed(int(f"{bits:032b}"[::-1], 2)),
                *struct.unpack("<i", bytes(both[i] for i in (6, 0, 2, 7))),
                signed(bits * 0x12345678 >> 32),
                value * -77777777 >> 32,
                (bits & 0x7FFFFF) * 3 if bits & 0x400000 == 0 else signed((bits & 0x7FFFFF) * 3),
                *(0, 0, 0),
                signed((0x89ABCDEF << 32 | bits) << 12 >> 32),
                5
                + sum(
                    a * b for a, b in zip(struct.unpack("4b", both[:4]), (4, 3, 2, 1), strict=True)
                ),
            ]
        )
    expected = np.array(columns).T
    expected[8] = [2, -4, 2**31 - 1, 0, 0, 7]
    expected[9] = [2, -3, 2**31 - 1, 0, 0, 7]
    expected[10] = np.array([3, 0, 3000000000, 0, 0, 7], np.uint32).view(np.int32)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("seed", [None, 4])
def test_a_sleeping_thread_lets_others_run(seed):
    turn = np.zeros(1, np.int32)
    launch(module("features.cu", "relay", checked=False), (1,), (48,), turn, seed=seed)
    assert turn[0] == 48


def test_limits_of_a_launch():
    kernel = module("faults.cu", "writes_its_input", checked=False)
    arrays = np.zeros(64, np.float32), np.zeros(64, np.float32)
    for grid, block, shared, words in (
        ((1, 70000), (1,), 0, "grid"),
        ((1,), (1025,), 0, "1024 threads"),
        ((1,), (1, 1, 65), 0, "64 in z"),
        ((0,), (1,), 0, "at least 1"),
        ((1,), (1,), 227 * 1024 + 1, "shared_bytes 232449"),
    ):
        with pytest.raises(ValueError, match=words):
            launch(kernel, grid, block, *arrays, 0, shared_bytes=shared)
    launch(kernel, (1,), (64,), *arrays, 0, shared_bytes=227 * 1024)


def test_launches_from_several_python_threads():
    kernel = module("features.cu", "row_sums", checked=False)
    rows = np.random.default_rng(0).integers(-9, 9, (200, 300)).astype(np.float32)
    results = [np.zeros((200, 4), np.float32) for _ in range(4)]

    def work(sums: np.ndarray) -> None:
        for _ in range(5):
            sums[:] = 0
            launch(kernel, (200,), (128,), sums, rows, 300, shared_bytes=1200)

    workers = [threading.Thread(target=work, args=[sums]) for sums in results]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for sums in results:
        np.testing.assert_array_equal(sums[:, 0], rows.sum(1))


def test_a_kernel_that_does_not_compile(tmp_path):
    path = tmp_path / "typo.cu"
    path.write_text('\nextern "C" __global__ void typo(float* out) {\n  out[0] = undeclared;\n}\n')
    with pytest.raises(CompileError, match=r"typo.cu:3:\d+: error: .*undeclared"):
        HostModule(KernelSource(path, "typo"), {}, checked=False)


def test_the_same_text_in_another_folder_is_not_compiled_again(tmp_path):
    def built(name, value):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            f'extern "C" __global__ void fill(float* out) {{ out[0] = {value}; }}\n// {tmp_path}\n'
        )
        return HostModule(KernelSource(path, "fill"), {}, checked=True).path

    one = built("one/fill.cu", 7)
    assert built("two/fill.cu", 7) == one
    assert built("two/other.cu", 7) != one, "messages name the file"
    assert built("two/fill.cu", 8) != one


@pytest.mark.parametrize("place", ["one/k.cu", "{}/one/k.cu"])
def test_the_current_folder_holds_no_headers(tmp_path, monkeypatch, place):
    (tmp_path / "one").mkdir()
    text = 'extern "C" __global__ void k(int* out) { out[0] = VALUE; }\n'
    (tmp_path / "one/k.cu").write_text(f'#include "value.cuh"\n// {place}{tmp_path}\n{text}')
    (tmp_path / "one/value.cuh").write_text("#define VALUE 1\n")
    for name in ("value.cuh", "sandbox_host.h", "one/sandbox_host.h"):
        (tmp_path / name).write_text("#define VALUE nothing\n")
    monkeypatch.chdir(tmp_path)
    out = np.zeros(1, np.int32)
    kernel = HostModule(KernelSource(Path(place.format(tmp_path)), "k"), {}, checked=False)
    launch(kernel, (1,), (1,), out)
    assert out[0] == 1


def test_dynamic_shared_memory_as_it_may_be_declared(tmp_path):
    forms = (
        "extern __shared__ float tile[];",
        "extern __shared__ __align__(16) float tile[];",
        "extern __align__(16) __shared__ float tile[];",
        "extern __shared__\n    alignas(8) volatile float tile [ ];",
    )
    for number, form in enumerate(forms):
        path = tmp_path / f"form{number}.cu"
        path.write_text(
            'extern "C" __global__ void form(float* out, int line) {\n'
            f"  {form}\n  tile[0] = __LINE__;\n  out[0] = tile[0];\n}}\n"
        )
        out = np.zeros(1, np.float32)
        kernel = HostModule(KernelSource(path, "form"), {}, checked=False)
        launch(kernel, (1,), (1,), out, 0, shared_bytes=8)
        assert out[0] == 3 + form.count("\n")


def test_a_name_of_the_c_library_is_free(tmp_path):
    path = tmp_path / "ftw.cu"
    path.write_text('extern "C" __global__ void ftw(float* out) { out[0] = 7.0f; }\n')
    out = np.zeros(1, np.float32)
    launch(HostModule(KernelSource(path, "ftw"), {}, checked=False), (1,), (1,), out)
    assert out[0] == 7


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(MissingDependency, match="CXX is 'no-such-compiler'"):
        host_runner.compiler()
    monkeypatch.setenv("CXX", "")
    assert host_runner.compiler().name in ("g++", "clang++")
    monkeypatch.setenv("PATH", "")
    assert "install g++" in unavailable_reason()


@pytest.mark.parametrize("portable", [0, 1], ids=["native", "portable"])
def test_context_switch(portable, tmp_path):
    runtime = Path(host_runner.__file__).with_name("host") / "runtime"
    program = tmp_path / "fibers"
    sources = [KERNELS / "fibers.cpp", runtime / "fiber.cpp"]
    flags = ["-std=c++17", "-O2", f"-DSANDBOX_UCONTEXT={portable}", f"-I{runtime}", "-o", program]
    subprocess.run([host_runner.compiler(), *flags, *sources], check=True)
    subprocess.run([program], check=True)
