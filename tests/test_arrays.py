"""The array bridge: what comes in shares memory and lifetime, devices and streams come back."""

from __future__ import annotations

import gc
import subprocess
import sys
import types

import ml_dtypes
import numpy as np
import pytest

from sandbox import arrays
from sandbox.arrays import (
    DTYPES,
    adopt,
    bfloat16,
    borrow,
    device_scalar,
    exporter,
    namespace,
    streams,
)

torch = pytest.importorskip("torch", reason="torch is not installed")

# Before 2.1, NumPy's DLPack could not say what is read-only, and took everything in as read-only.
READ_ONLY_FLAG = np.lib.NumpyVersion(np.__version__) >= "2.1.0"


class Producer:
    """A DLPack producer of no known library. `device` and `refusal` let it pretend."""

    def __init__(self, array, device=(1, 0), refusal: Exception | None = None):
        self.array, self.device, self.refusal, self.asked = array, device, refusal, {}

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        self.asked = options
        if self.refusal is not None:
            raise self.refusal
        return self.array.__dlpack__(**options)


class LegacyProducer(Producer):
    def __dlpack__(self, stream=None):
        return self.array.__dlpack__()


def test_numpy_passes_through_as_it_is():
    for array in (np.zeros((2, 3), bfloat16)[::-1, ::2], np.zeros(()), np.zeros((0, 4))):
        assert adopt(array) is array
    readonly = np.zeros(3)
    readonly.flags.writeable = False
    assert adopt(readonly) is readonly


def test_dtypes():
    assert set(DTYPES) == {"float32", "float16", "bfloat16", "uint8", "int32", "int64"}
    assert all(dtype == np.dtype(name) for name, dtype in DTYPES.items())
    assert bfloat16 == np.dtype(ml_dtypes.bfloat16)


def test_other_producers_are_shared_with_any_stride():
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    for view in (array[::-1, ::2], array.T, array[:0], array[2, 3:4].reshape(())):
        producer = Producer(view)
        adopted = adopt(producer)
        assert (adopted.shape, adopted.strides) == (view.shape, view.strides)
        assert adopted.ctypes.data == view.ctypes.data
        assert not producer.asked.get("copy")
    adopted = adopt(Producer(array))
    array[0, 1] = 7
    assert adopted[0, 1] == 7
    if READ_ONLY_FLAG:
        adopted[0, 0] = 5
        assert array[0, 0] == 5
    assert repr(exporter(Producer(array))) == "NumPy on cpu"


def test_pinned_memory_is_cpu_memory():
    array = np.arange(3, dtype=np.int32)
    assert adopt(Producer(array, device=(3, 0))).ctypes.data == array.ctypes.data


def test_other_producers_stay_alive():
    producer = Producer(np.full(1000, 3, np.int64))
    adopted = adopt(producer)
    del producer
    gc.collect()
    clutter = [np.full(1000, 255, np.int64) for _ in range(20)]
    assert (adopted == 3).all()
    assert len(clutter) == 20


def test_legacy_and_read_only_producers_are_inputs_only():
    readonly = np.arange(3, dtype=np.float32)
    readonly.flags.writeable = False
    producers = [LegacyProducer(np.arange(3, dtype=np.float32))]
    producers += [Producer(readonly)] if READ_ONLY_FLAG else []
    for producer in producers:
        adopted = adopt(producer, "out")
        assert adopted.tolist() == [0, 1, 2]
        with pytest.raises(ValueError, match="out: the array is read-only"):
            arrays.require_writeable(adopted, "out")


def test_what_numpy_cannot_import_is_refused_with_the_reason():
    with pytest.raises(TypeError, match=r"kv_c: .*Producer cannot be shared without a copy: Unsu"):
        adopt(Producer(torch.zeros(3, dtype=torch.bfloat16)), "kv_c")
    with pytest.raises(TypeError, match=r"kv_c: .*without a copy: not today"):
        adopt(Producer(None, refusal=BufferError("not today")), "kv_c")
    with pytest.raises(TypeError, match=r"kv_c: .*device type 7"):
        adopt(Producer(None, device=(7, 0)), "kv_c")


@pytest.mark.parametrize(
    "value",
    [[1.0, 2.0], (1, 2), 1.0, 3, True, None, "q", np.float32(1), np.ma.masked_array([1, 2])],
    ids=lambda value: type(value).__name__,
)
def test_values_that_are_not_arrays_are_refused(value):
    with pytest.raises(TypeError, match=f"block_table: expected an array.*{type(value).__name__}"):
        adopt(value, "block_table")
    with pytest.raises(TypeError, match="block_table: expected an array"):
        exporter(value, "block_table")


def test_numpy_kind():
    kind = exporter(np.zeros(3))
    adopted, result = kind.empty((2, 3), bfloat16)
    assert adopted is result
    assert (result.shape, result.dtype) == ((2, 3), bfloat16)
    assert kind.export(adopted) is adopted
    assert kind.finish(adopted, result) is result
    assert (kind.library, kind.device, repr(kind)) == ("NumPy", "cpu", "NumPy on cpu")


def test_borrow_adopts_arrays_and_passes_the_rest():
    out = torch.zeros(2, 3, dtype=torch.bfloat16)
    given = {
        "q": out[1:],
        "cos": np.ones((2, 2), np.float32),
        "scale": 0.5,
        "count": np.int64(3),
        "mask": None,
        "name": "auto",
        "flag": True,
        "dtype": bfloat16,
        "scalar_type": np.float32,
        "format": types.SimpleNamespace(block=16),
    }
    with borrow(given) as borrowed:
        assert borrowed.xp is np
        assert borrowed.kind is exporter(out)
        assert borrowed.arrays["q"].ctypes.data == out[1:].data_ptr()
        for name in given.keys() - {"q"}:
            assert borrowed.arrays[name] is given[name]
        assert all(borrowed.original(name) is value for name, value in given.items())


def test_borrow_first_array_decides_the_kind():
    tensor_, array = torch.zeros(2), np.zeros(2)
    for given, kind in [
        ({"scale": 1.0, "q": tensor_, "k": array}, exporter(tensor_)),
        ({"scale": 1.0, "k": array, "q": tensor_}, exporter(array)),
        ({"scale": 1.0}, exporter(array)),
        ({}, exporter(array)),
    ]:
        with borrow(given) as borrowed:
            assert borrowed.kind is kind


class Lookalike:
    shape = (3,)


@pytest.mark.parametrize(
    "value",
    [[np.zeros(2)], (1, 2), np.ma.masked_array([1]), Lookalike()],
    ids=lambda value: type(value).__name__,
)
def test_borrow_refuses_what_claims_to_be_an_array(value):
    with pytest.raises(TypeError, match="v: expected an array"), borrow({"v": value}):
        pass


def test_borrow_refuses_mixed_devices():
    q, far = np.zeros(2), Producer(None, device=(2, 1))
    with pytest.raises(ValueError, match="mixed devices: q is on cpu, k is on cuda:1"):
        borrow({"q": q, "scale": 1.0, "k": far}).__enter__()
    with pytest.raises(ValueError, match="mixed devices: k is on cuda:1, o is on cuda:0"):
        borrow({"k": far, "o": Producer(None, device=(2, 0))}).__enter__()
    with pytest.raises(ValueError, match="mixed devices: k is on cuda:1, q is on cpu"):
        borrow({"k": far, "one": np.zeros(()), "q": torch.zeros(1)}).__enter__()
    assert not far.asked


def test_borrow_lets_errors_of_the_call_through():
    with pytest.raises(KeyError), borrow({"q": np.zeros(2)}):
        raise KeyError


class FakeStream:
    def __init__(self, cuda, ptr, capturing=False):
        self.cuda, self.ptr, self.capturing, self.log = cuda, ptr, capturing, []

    def use(self):
        self.cuda.streams[self.cuda.current] = self

    def record(self):
        return self

    def wait_event(self, other):
        self.log.append(other)

    def synchronize(self):
        self.log.append("synchronize")

    def is_capturing(self):
        return self.capturing


class FakeCuda:
    """Two GPUs' current device and streams, with CuPy's names."""

    def __init__(self):
        self.current = 0
        self.streams = {gpu: FakeStream(self, 0) for gpu in (0, 1)}
        self.runtime = types.SimpleNamespace(
            getDevice=lambda: self.current, setDevice=lambda gpu: setattr(self, "current", gpu)
        )

    def get_current_stream(self):
        return self.streams[self.current]


class FakeKind(arrays.Kind):
    def __init__(self, gpu, stream=None, error=None):
        super().__init__(gpu)
        self._stream, self.error = stream, error

    def stream(self):
        if self.error:
            raise self.error
        return self._stream


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(streams, "import_cupy", lambda: types.SimpleNamespace(cuda=fake))
    return fake


def state(cuda):
    return cuda.current, dict(cuda.streams)


def test_device_and_stream_are_made_current_and_restored(cuda):
    before = state(cuda)
    theirs = FakeStream(cuda, 77)
    with streams.make_current(1, {FakeKind(1, theirs)}):
        assert cuda.current == 1
        assert cuda.get_current_stream() is theirs
        cuda.runtime.setDevice(0)
    assert state(cuda) == before
    assert not theirs.log
    with pytest.raises(KeyError), streams.make_current(1, {FakeKind(1, theirs)}):
        raise KeyError
    assert state(cuda) == before
    with pytest.raises(KeyError), streams.make_current(1, {FakeKind(1, error=KeyError())}):
        pass
    assert state(cuda) == before


def test_without_tensors_the_current_stream_stays(cuda):
    mine = FakeStream(cuda, 5)
    cuda.streams[1] = mine
    with streams.make_current(1, {FakeKind(1)}):
        assert cuda.get_current_stream() is mine
    assert cuda.streams[1] is mine
    assert not mine.log


def test_mixed_libraries_are_ordered_except_under_capture(cuda):
    outer = cuda.streams[0]
    theirs, capturing = FakeStream(cuda, 77), FakeStream(cuda, 78, capturing=True)
    for stream, expected in [(theirs, [outer]), (capturing, [])]:
        with streams.make_current(0, {FakeKind(0), FakeKind(0, stream)}):
            assert stream.log == expected


def test_kinds_that_must_wait_do_so_at_the_end(cuda):
    kind = FakeKind(0)
    kind.waits_on_exit = True
    with streams.make_current(0, {kind}):
        assert not cuda.streams[0].log
    assert cuda.streams[0].log == ["synchronize"]


def test_namespace():
    assert namespace(np.zeros(1), np.zeros(2)) is np
    assert not arrays.is_gpu(np.zeros(1))
    with pytest.raises(TypeError, match=r"array 1 is torch\.Tensor, expected an adopted"):
        namespace(np.zeros(1), torch.zeros(1))
    with pytest.raises(TypeError, match="at least one"):
        namespace()


def test_address():
    array = np.zeros((3, 4), np.float16)
    assert arrays.address(array[1:, 2:]) == array.ctypes.data + 12


def test_require_writeable():
    arrays.require_writeable(np.zeros((2, 3)), "out")
    arrays.require_writeable(np.zeros((1, 3))[:, :1], "out")
    empty = torch.from_numpy(np.zeros((1, 0), np.float32)).expand(4, 0)
    arrays.require_writeable(adopt(empty), "out")
    readonly = np.zeros(3)
    readonly.flags.writeable = False
    with pytest.raises(ValueError, match="out: the array is read-only"):
        arrays.require_writeable(readonly, "out")
    with (
        borrow({"out": readonly, "x": torch.zeros(3, 1).expand(3, 4), "y": torch.ones(2)}) as call,
    ):
        call.require_writeable("y")
        with pytest.raises(ValueError, match="out: the array is read-only"):
            call.require_writeable("y", "out")
        with pytest.raises(ValueError, match="x: elements share memory"):
            call.require_writeable("x")


SCALARS = [
    2.0,
    2,
    np.float64(2),
    np.float32(2),
    np.int64(2),
    ml_dtypes.bfloat16(2),
    np.full((), 2.0),
    np.full((1, 1), 2, bfloat16),
    torch.tensor(2.0),
    torch.tensor([2.0], dtype=torch.float64),
    torch.nn.Parameter(torch.tensor(2.0)),
    torch.tensor(2, dtype=torch.bfloat16),
]


@pytest.mark.parametrize("value", SCALARS, ids=lambda value: type(value).__name__)
def test_device_scalar_gives_the_same_bytes_for_every_spelling(value):
    result = device_scalar(value, np)
    assert (result.shape, result.dtype) == ((1,), np.float32)
    assert result.flags.c_contiguous
    assert result.tobytes() == np.float32(2).tobytes()


def test_device_scalar_does_not_copy_what_is_right_already():
    tensor_ = torch.tensor(2.0)
    assert device_scalar(tensor_, np).ctypes.data == tensor_.data_ptr()
    strided = np.arange(6, dtype=np.float32).reshape(2, 3)[1:, 2:]
    assert device_scalar(strided, np).ctypes.data == strided.ctypes.data
    count = np.zeros((), np.int64)
    assert device_scalar(count, np, np.int64).ctypes.data == count.ctypes.data


def test_device_scalar_keeps_special_values():
    assert np.signbit(device_scalar(-0.0, np)[0])
    assert np.isnan(device_scalar(float("nan"), np)[0])
    assert device_scalar(float("-inf"), np)[0] == -np.inf


@pytest.mark.parametrize("value", ["2.0", None, True, 1j, np.bool_(True), [2.0], np.complex64(1)])
def test_device_scalar_refuses_what_is_not_a_number(value):
    with pytest.raises(TypeError, match="k_scale: expected a number"):
        device_scalar(value, np, name="k_scale")


def test_device_scalar_refuses_many_elements_and_too_large_values():
    with pytest.raises(ValueError, match=r"k_scale: expected one element, got shape \(2,\)"):
        device_scalar(np.ones(2), np, name="k_scale")
    with pytest.raises(ValueError, match="expected one element"):
        device_scalar(torch.ones(0), np)
    for value in (1e300, np.float64(1e39), 10**400, np.full(1, 1e300)):
        with pytest.raises(ValueError, match=r"k_scale: .* is too large for float32"):
            device_scalar(value, np, name="k_scale")


def run(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr


def test_importing_arrays_imports_no_other_library():
    run(
        "import sys, sandbox.arrays as A, numpy as np\n"
        "with A.borrow({'q': np.zeros(2), 's': 1.0}) as b: A.namespace(b.arrays['q'])\n"
        "A.device_scalar(2.0, np)\n"
        "assert not {'torch', 'cupy', 'jax'} & set(sys.modules)"
    )


def test_arrays_works_where_no_other_library_is_installed():
    run(
        "import sys\n"
        "for name in ('torch', 'cupy', 'jax'): sys.modules[name] = None\n"
        "import sandbox.arrays as A, numpy as np\n"
        "with A.borrow({'q': np.zeros(2), 's': 1.0}) as b: A.namespace(b.arrays['q'])\n"
        "class Far:\n"
        "    def __dlpack__(self, **options): raise AssertionError\n"
        "    def __dlpack_device__(self): return 2, 0\n"
        "try: A.adopt(Far())\n"
        "except ImportError as error: assert 'CuPy' in str(error)\n"
        "else: raise AssertionError"
    )


ORDERS = ["import torch\nimport sandbox.arrays as A", "import sandbox.arrays as A\nimport torch"]


@pytest.mark.parametrize("imports", ORDERS, ids=["torch first", "sandbox first"])
def test_both_import_orders(imports):
    run(
        f"{imports}\n"
        "import numpy as np\n"
        "t = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))\n"
        "a = A.adopt(t)\n"
        "assert a.dtype == A.bfloat16 and a.ctypes.data == t.data_ptr()\n"
        "assert A.to_torch(a).data_ptr() == t.data_ptr()\n"
        "with A.borrow({'x': t, 'y': np.zeros(1)}) as b:\n"
        "    out, result = b.kind.empty(2, 'bfloat16')\n"
        "assert result.data_ptr() == out.ctypes.data"
    )


def test_scales_that_are_codes_are_refused():
    for codes in (np.array([0x38], np.uint8), np.array([True])):
        with pytest.raises(TypeError, match="scale"):
            arrays.device_scalar(codes, np)
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match="k_scale"):
        arrays.device_scalar(torch.tensor([0.5]).to(torch.float8_e4m3fn), np, name="k_scale")
