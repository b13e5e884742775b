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
from sandbox.arrays import DTYPES, adopt, bfloat16, borrow, exporter, namespace

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


def test_dtypes_that_numpy_cannot_import_are_refused_with_the_reason(torch):
    with pytest.raises(TypeError, match=r"kv_c: .*Producer cannot be shared without a copy: Unsu"):
        adopt(Producer(torch.zeros(3, dtype=torch.bfloat16)), "kv_c")


def test_what_a_producer_refuses_is_refused_with_its_reason():
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


def test_borrow_adopts_arrays_and_passes_the_rest(torch):
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


def test_borrow_first_array_decides_the_kind(torch):
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
        borrow({"k": far, "one": np.zeros(()), "q": Producer(q)}).__enter__()
    assert not far.asked


def test_borrow_lets_errors_of_the_call_through():
    with pytest.raises(KeyError), borrow({"q": np.zeros(2)}):
        raise KeyError


def test_namespace():
    assert namespace(np.zeros(1), np.zeros(2)) is np
    assert not arrays.is_gpu(np.zeros(1))
    with pytest.raises(TypeError, match=r"array 1 is \S*Producer, expected an adopted"):
        namespace(np.zeros(1), Producer(np.zeros(1)))
    with pytest.raises(TypeError, match="at least one"):
        namespace()


def test_address():
    array = np.zeros((3, 4), np.float16)
    assert arrays.address(array[1:, 2:]) == array.ctypes.data + 12


def test_require_writeable():
    arrays.require_writeable(np.zeros((2, 3)), "out")
    arrays.require_writeable(np.zeros((1, 3))[:, :1], "out")
    empty = np.lib.stride_tricks.as_strided(np.zeros((1, 0)), (4, 0), (0, 8))
    arrays.require_writeable(empty, "out")
    repeated = np.lib.stride_tricks.as_strided(np.zeros(3), (3, 4), (8, 0))
    with pytest.raises(ValueError, match="out: elements share memory"):
        arrays.require_writeable(repeated, "out")
    readonly = np.zeros(3)
    readonly.flags.writeable = False
    with pytest.raises(ValueError, match="out: the array is read-only"):
        arrays.require_writeable(readonly, "out")


def test_borrowed_outputs_are_checked_as_passed_and_as_adopted(torch):
    readonly = np.zeros(3)
    readonly.flags.writeable = False
    repeated, fine = torch.zeros(3, 1).expand(3, 4), torch.ones(2)
    with borrow({"out": readonly, "x": repeated, "y": fine}) as call:
        call.require_writeable("y")
        with pytest.raises(ValueError, match="out: the array is read-only"):
            call.require_writeable("y", "out")
        with pytest.raises(ValueError, match="x: elements share memory"):
            call.require_writeable("x")


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
def test_both_import_orders(torch, imports):
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
