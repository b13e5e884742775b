"""Typed launches of CUDA kernels, on the host runner and on a GPU."""

import ctypes
import threading
import time
from collections import Counter
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from variants_here import needs_host, needs_nvrtc

from sandbox.kernels.cuda import (
    CompileError,
    CudaKernel,
    device_info,
    host_options,
    overlap,
    prebuild,
    record_launches,
)
from sandbox.kernels.cuda import nvrtc as nvrtc_module

KERNELS = Path(__file__).with_name("cuda_kernels")
BF16 = np.dtype(ml_dtypes.bfloat16)


def host_array(array: np.ndarray) -> np.ndarray:
    return array


def gpu_array(array: np.ndarray):
    import cupy

    return cupy.asarray(array)


@pytest.fixture(
    params=[
        pytest.param(host_array, id="host", marks=needs_host),
        pytest.param(
            gpu_array,
            id="gpu",
            marks=pytest.mark.gpu,
        ),
    ]
)
def put(request):
    """Puts a NumPy array where the kernel is to run."""
    return request.param


def get(array) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.get()


def scalars(put, **changed):
    values = {
        "i": -7,
        "u": 2**32 - 1,
        "l": np.int32(-5),
        "ul": 2**53,
        "f": 2.0,
        "d": 0.1,
        "b": True,
        "s": np.int64(-300),
        "pair": np.array([(1.5, 11)], dtype=np.dtype("f4, i8", align=True))[0],
        "maybe": None,
    } | changed
    out = put(np.full(11, np.nan))
    CudaKernel(KERNELS / "scalars.cu", "scalars")(1, 1, out, *values.values(), macros={})
    return get(out).tolist()


def test_scalars_arrive_as_their_c_types(put):
    expected = [-7.0, 2.0**32 - 1, -5.0, 2.0**53, 2.0, 0.1, 1.0, -300.0, 1.5, 11.0]
    assert scalars(put) == [*expected, -1.0]
    assert scalars(put, i=np.uint8(200), f=np.float64(2), d=3, b=np.bool_(False), l=-(2**53)) == [
        *(200.0, 2.0**32 - 1, -(2.0**53), 2.0**53, 2.0, 3.0, 0.0, -300.0, 1.5, 11.0, -1.0)
    ]
    pair = np.array([(1.5, 11)], dtype=np.dtype("f4, i8", align=True)).tobytes()
    assert scalars(put, pair=pair, maybe=put(np.array([4.0], np.float32)))[8:] == [1.5, 11.0, 4.0]
    assert scalars(put, f=np.inf)[4] == np.inf


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("i", 2**31, ValueError, r"i: 2147483648 does not fit int \(-2147483648 to 2147483647\)"),
        ("u", -1, ValueError, "u: -1 does not fit unsigned int"),
        ("l", 2**63, ValueError, "l: "),
        ("i", 2.0, TypeError, r"i \(int\): expected an integer, got 2.0"),
        ("i", np.float32(2), TypeError, "i .*expected an integer"),
        ("i", None, TypeError, "i .*expected an integer, got None"),
        ("f", 1e39, ValueError, "f: 1e[+]39 does not fit float"),
        ("f", "2", TypeError, "f .*expected a number, got '2'"),
        ("b", 2, ValueError, "b: 2 does not fit bool"),
        ("s", 2**15, ValueError, "s: 32768 does not fit short"),
        ("pair", 3, TypeError, r"pair \(Pair\): expected bytes or a NumPy record, got 3"),
        ("maybe", 1.0, TypeError, r"maybe \(float\): expected an array or None, got 1.0"),
        ("maybe", np.zeros(1), TypeError, r"maybe \(float\*\): expected float32, got float64"),
        ("maybe", np.zeros(1, ">f4"), TypeError, "maybe .*expected float32, got >f4"),
    ],
)
def test_scalar_that_does_not_fit_is_refused(name, value, error, message):
    with record_launches() as launches, pytest.raises(error, match=message):
        scalars(host_array, **{name: value})
    assert launches == []


@pytest.mark.parametrize(
    ("written", "taken", "refused"),
    [
        (np.float32, ["float32"], ["float64", "float16", "int32"]),
        (BF16, [BF16, "int16", "uint16"], ["float16", "float32", "uint8"]),
        (np.float16, ["float16", "int16", "uint16"], [BF16, "float32"]),
        (ml_dtypes.float8_e4m3fn, [ml_dtypes.float8_e4m3fn, "uint8"], [ml_dtypes.float8_e5m2]),
        (np.uint8, ["uint8", "int8", "bool", ml_dtypes.float8_e4m3fn], ["int16", "float32"]),
        (np.int32, ["int32"], ["int64", "uint32"]),
        ("size_t", ["uint64"], ["int64"]),
        ("char", ["uint8", "float64", BF16], []),
        ("uint4", ["uint8", "float64", BF16], []),
        ("U", ["float32"], ["float64"]),
    ],
)
def test_array_dtype_is_held_against_the_pointer(scale, written, taken, refused):
    out = np.empty(4, np.float32)
    macros = {"T": written, "U": "float"}
    with record_launches() as launches:
        for dtype in taken:
            scale(1, 4, np.empty(4, dtype), out, 1.0, 4, macros=macros)
        for dtype in refused:
            with pytest.raises(TypeError, match=r"x \(T\*\): expected"):
                scale(1, 4, np.empty(4, dtype), out, 1.0, 4, macros=macros)
    assert len(launches) == len(taken)


def test_launch_is_recorded_and_not_run(scale):
    out = np.full(5, 7, np.float32)
    macros = {"T": np.float32, "N": True}
    with record_launches() as launches:
        scale((2, 3), np.int32(64), np.empty(5, np.float32), out, 1, 5, macros=macros)
        scale((2, 0), 64, np.empty(5, np.float32), out, 1, 5, macros=macros)
    assert len(launches) == 1
    assert launches[0].kernel is scale
    assert launches[0].macros == {"T": "float", "N": "1"}
    assert (launches[0].grid, launches[0].block) == ((2, 3, 1), (64, 1, 1))
    assert np.all(out == 7)


@pytest.mark.parametrize(
    ("grid", "block", "shared", "error", "message"),
    [
        ((1, 65536), 32, 0, ValueError, "grid: .*65535"),
        (2**31, 32, 0, ValueError, "grid: .*2147483647"),
        (-1, 32, 0, ValueError, "grid: -1"),
        (1, 0, 0, ValueError, "block: 0"),
        (1, (1, 1, 65), 0, ValueError, "block: .*64"),
        (1, (64, 32), 0, ValueError, "more than 1024 threads"),
        (1, 32, 240_000, ValueError, "shared_bytes: 240000 .*232448"),
        (1, 32, -1, ValueError, "shared_bytes: -1"),
        (1.0, 32, 0, TypeError, "grid: expected an int"),
        ((1, 1, 1, 1), 32, 0, TypeError, "grid: expected .* up to three"),
    ],
)
def test_launch_limits(grid, block, shared, error, message):
    kernel = CudaKernel(KERNELS / "reverse.cu", "reverse")
    x = np.empty(32, np.int32)
    with record_launches() as launches, pytest.raises(error, match=message):
        kernel(grid, block, x, x, macros={}, shared_bytes=shared)
    assert launches == []


def test_wrong_calls_are_refused(scale):
    x, out = np.empty(4, np.float32), np.empty(4, np.float32)
    macros = {"T": np.float32}
    with record_launches() as launches:
        with pytest.raises(TypeError, match=r"expected 4 arguments \(x, out, by, n\), got 3"):
            scale(1, 4, x, out, 1.0, macros=macros)
        out.flags.writeable = False
        with pytest.raises(ValueError, match="out: read-only array"):
            scale(1, 4, x, out, 1.0, 4, macros=macros)
        scale(1, 4, out, x, 1.0, 4, macros=macros)
    assert len(launches) == 1
    with pytest.raises(FileNotFoundError):
        CudaKernel(KERNELS / "absent.cu", "scale")(1, 1, macros={})


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
def test_strided_arrays_and_rounding(put, scale, dtype):
    values = np.arange(40).reshape(8, 5).astype(dtype)
    backing = put(np.full(16, np.nan, np.float32))
    scale(2, 4, put(values)[3:, 2:], backing[1:], 0.5, 6, macros={"T": dtype})
    expected = np.full(16, np.nan, np.float32)
    expected[1:7] = values.reshape(-1)[17:23].astype(np.float32) * np.float32(0.5)
    np.testing.assert_array_equal(get(backing), expected)


def test_dynamic_shared_memory_beyond_48_kib(put):
    kernel = CudaKernel(KERNELS / "reverse.cu", "reverse")
    x = np.arange(96, dtype=np.int32)
    for shared_bytes in (32 * 4, 49152, 60000):
        out = put(np.zeros_like(x))
        kernel(3, 32, put(x), out, macros={}, shared_bytes=shared_bytes)
        np.testing.assert_array_equal(get(out), x.reshape(3, 32)[:, ::-1].reshape(-1))


def test_empty_grid_launches_nothing(put, scale):
    nothing = put(np.empty(0, np.float32))
    scale(0, 32, nothing, nothing, 1.0, 0, macros={"T": np.float32})


def test_macros_that_compare_equal_are_told_apart(put, copied):
    copied.path.with_name("factor.cuh").write_text("#define FACTOR (VALUE / 2)\n")
    kernel = CudaKernel(copied.path, "scale")
    x, found = put(np.ones(1, np.float32)), []
    for value in (1, True, 1.0):
        out = put(np.zeros(1, np.float32))
        kernel(1, 1, x, out, 1.0, 1, macros={"T": np.float32, "VALUE": value})
        found.append(get(out)[0])
    assert found == [0.0, 0.0, 0.5]


def test_edited_header_changes_the_result(put, copied, monkeypatch):
    monkeypatch.setattr("sandbox.kernels.cuda.kernel._RELOAD", True)
    kernel = CudaKernel(copied.path, "scale")
    x, found = put(np.ones(1, np.float32)), []
    for factor in ("2.0f", "3.0f"):
        copied.path.with_name("factor.cuh").write_text(f"#define FACTOR {factor}\n")
        out = put(np.zeros(1, np.float32))
        kernel(1, 1, x, out, 1.0, 1, macros={"T": np.float32})
        found.append(get(out)[0])
    assert found == [2.0, 3.0]


@needs_host
def test_host_options_choose_build_and_schedule(scale, monkeypatch):
    asked = []

    class Module:
        def __init__(self, source, macros, *, checked):
            asked.append((source.entry, macros, checked))

        def launch(self, grid, block, arguments, *, shared_bytes, seed, global_races):
            asked.append((grid, block, shared_bytes, seed, global_races))

    monkeypatch.setattr("sandbox.kernels.cuda.kernel.HostModule", Module)
    x = np.empty(4, np.float32)

    def call():
        scale(1, 4, x, x, 1.0, 4, macros={"T": np.float32})

    call()
    with host_options(checked=True, seed=5, global_races=True):
        call()
    call()
    launch = ((1, 1, 1), (4, 1, 1), 0)
    built = ("scale", {"T": "float"})
    assert asked == [
        *((*built, False), (*launch, None, False)),
        *((*built, True), (*launch, 5, True)),
        (*launch, None, False),
    ]


def test_prebuild_compiles_what_launches_share_once(monkeypatch):
    calls = []
    monkeypatch.setattr(
        nvrtc_module, "compile_cubin", lambda source, macros, arch: calls.append((macros, arch))
    )
    monkeypatch.setattr(
        "sandbox.kernels.cuda.build.HostModule",
        lambda source, macros, *, checked: calls.append((source.entry, checked)),
    )
    x = np.empty(4, np.float32)
    reverse = CudaKernel(KERNELS / "reverse.cu", "reverse")
    bounded = CudaKernel(KERNELS / "reverse.cu", "bounded")
    with record_launches() as launches:
        for size in (4, 5, 4):
            reverse(1, 4, None, None, macros={"SIZE": size})
        bounded(1, 4, x, macros={"SIZE": 4})
    built = list(prebuild(launches, target="sm_90", workers=2))
    assert sorted(calls, key=str) == [({"SIZE": "4"}, "sm_90"), ({"SIZE": "5"}, "sm_90")]
    assert [(each.done, each.total, each.error) for each in built] == [(1, 2, None), (2, 2, None)]
    calls.clear()
    assert len(list(prebuild(launches, target="host-checked", workers=2))) == 3
    assert sorted(calls) == [("bounded", True), ("reverse", True), ("reverse", True)]


@needs_nvrtc
@pytest.mark.usefixtures("fresh_cache")
def test_prebuild_reports_what_does_not_compile(scale):
    x, out = np.empty(4, np.float32), np.empty(4, np.float32)
    with record_launches() as launches:
        for dtype in ("float", "Missing"):
            scale(1, 4, x, out, 1.0, 4, macros={"T": dtype})
    errors = {each.launch.macros["T"]: each.error for each in prebuild(launches, target="sm_75")}
    assert errors["float"] is None
    assert isinstance(errors["Missing"], CompileError)


@pytest.mark.gpu
def test_gpu_limits_and_places(scale):
    import cupy

    x, out = cupy.ones(4, "float32"), cupy.zeros(4, "float32")
    with pytest.raises(TypeError, match="arrays in different places: x on GPU 0, out on the host"):
        scale(1, 4, x, np.zeros(4, np.float32), 1.0, 4, macros={"T": np.float32})
    reverse = CudaKernel(KERNELS / "reverse.cu", "reverse")
    bounded = CudaKernel(KERNELS / "reverse.cu", "bounded")
    ints = cupy.arange(32, dtype="int32")
    too_much = device_info().shared_per_block + 1
    with pytest.raises(ValueError, match="shared_bytes"):
        reverse(1, 32, ints, cupy.empty_like(ints), macros={}, shared_bytes=too_much)
    with pytest.raises(ValueError, match="more threads than the 96"):
        bounded(1, 128, cupy.zeros(128, "float32"), macros={})
    pair = CudaKernel(KERNELS / "scalars.cu", "scalars")
    values = (1, 1, 1, 1, 1.0, 1.0, True, 1, b"short", None)
    with pytest.raises(TypeError, match="has 5 bytes, the struct has 16"):
        pair(1, 1, cupy.zeros(11), *values, macros={})
    newer = CudaKernel(scale.source.path, "scale", min_cc=(99, 0))
    with pytest.raises(RuntimeError, match=r"needs compute capability 99\.0"):
        newer(1, 4, x, out, 1.0, 4, macros={"T": np.float32})


@pytest.mark.gpu
def test_gpu_launch_is_on_the_current_stream_and_can_be_captured(scale):
    import cupy

    x, out = cupy.full(4, 3, "float32"), cupy.zeros(4, "float32")
    macros = {"T": np.float32}
    scale(1, 4, x, out, 1.0, 4, macros=macros)
    out[:] = 0
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        scale(1, 4, x, out, 2.0, 4, macros=macros)
        graph = stream.end_capture()
        assert not out.get(stream=stream).any()
        graph.launch(stream)
        stream.synchronize()
    assert out.get().tolist() == [6.0] * 4


def test_overlapping_launches_of_threads_pass_their_own_arguments(monkeypatch):
    """A driver that yields to other threads before it reads what it was given."""
    passed = []

    class Driver:
        @staticmethod
        def cuLaunchKernelEx(config, function, pointers, extra):
            time.sleep(0.001)
            values = [ctypes.c_int32.from_address(pointer).value for pointer in pointers]
            passed.append((config._obj.stream, *config._obj.grid, *values))
            return 0

    monkeypatch.setattr(overlap, "_driver", Driver)
    function = overlap.OverlappingFunction("shared", 1, [4, 4])

    def launch(number):
        for _ in range(20):
            values = [np.int32(number), np.int32(-number)]
            function.launch((number, 1, 1), (32, 1, 1), values, 0, 1000 + number)

    threads = [threading.Thread(target=launch, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(passed) == {(1000 + n, n, 1, 1, n, -n): 20 for n in range(1, 5)}
