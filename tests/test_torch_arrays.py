"""torch tensors in the array bridge: bits, strides and lifetime, on the CPU and on a GPU."""

from __future__ import annotations

import contextlib
import gc

import ml_dtypes
import numpy as np
import pytest

from sandbox import arrays
from sandbox.arrays import DTYPES, adopt, bfloat16, borrow, device_scalar, exporter, namespace

torch = pytest.importorskip("torch", reason="torch is not installed")

FP8 = ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"]
TORCH_NAMES = [*DTYPES, *FP8]


def on_gpu(test):
    sees_none = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
    return pytest.mark.gpu(sees_none(test))


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy", reason="CuPy is not installed")


def tensor(name: str, shape: tuple[int, ...] = (3, 5), device: str = "cpu"):
    """A tensor of the named dtype whose bytes all differ from zero."""
    dtype = getattr(torch, name)
    size = int(np.prod(shape, dtype=int))
    if name in FP8:
        return (torch.arange(size, device=device) % 50 + 1).to(torch.uint8).view(dtype).view(shape)
    return (torch.arange(size, device=device) % 50 + 1).to(dtype).view(shape)


def numpy_dtype(name: str) -> np.dtype:
    return DTYPES.get(name, np.dtype(np.uint8))


@pytest.mark.parametrize("name", TORCH_NAMES)
def test_torch_shares_bits_both_ways(name):
    source = tensor(name)
    array = adopt(source)
    assert array.dtype == numpy_dtype(name)
    assert array.shape == (3, 5)
    assert array.ctypes.data == source.data_ptr()
    assert array.tobytes() == bytes(source.view(torch.uint8).flatten().tolist())
    source.view(torch.uint8)[1, 2] = 77
    assert array.view(np.uint8)[1, 2] == 77
    array.view(np.uint8)[2, 1] = 78
    assert source.view(torch.uint8)[2, 1] == 78


@pytest.mark.parametrize("name", TORCH_NAMES)
def test_torch_views_keep_their_strides(name):
    whole = tensor(name, (4, 6, 10))
    size = whole.element_size()
    view = whole[1:, ::2, 3:8].permute(2, 0, 1)
    array = adopt(view)
    assert array.shape == (5, 3, 3)
    assert array.strides == (size, 60 * size, 20 * size)
    assert array.ctypes.data == view.data_ptr() == whole.data_ptr() + (60 + 3) * size
    expected = adopt(whole)[1:, ::2, 3:8].transpose(2, 0, 1)
    assert array.tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", TORCH_NAMES)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2)])
def test_torch_scalars_and_empty_tensors(name, shape):
    source = tensor(name, shape)
    array = adopt(source)
    assert (array.shape, array.dtype) == (shape, numpy_dtype(name))
    if array.size:
        assert array.ctypes.data == source.data_ptr()


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_parameters_and_tensors_with_history(name):
    parameter = torch.nn.Parameter(tensor(name))
    for source in (parameter, parameter[1:], parameter.view(5, 3)):
        array = adopt(source)
        assert array.ctypes.data == source.data_ptr()
    array[0, 0] = 99
    assert parameter.flatten()[0] == 99
    assert parameter.requires_grad


@pytest.mark.parametrize("name", TORCH_NAMES)
def test_torch_memory_outlives_the_tensor(name):
    source = tensor(name, (64, 33))
    array = adopt(source[:, 1:])
    expected = array.copy()
    del source
    gc.collect()
    clutter = [tensor("uint8", (64 * 33 * 4,)).fill_(255) for _ in range(20)]
    assert array.tobytes() == expected.tobytes()
    assert len(clutter) == 20


@pytest.mark.parametrize("name", DTYPES)
def test_to_torch_shares_bits_both_ways(name):
    array = np.arange(1, 25).astype(DTYPES[name]).reshape(4, 6)[1:, ::2]
    result = arrays.to_torch(array)
    assert result.dtype == getattr(torch, name)
    assert result.data_ptr() == array.ctypes.data
    assert result.shape == (3, 3)
    assert result.stride() == (6, 2)
    result[0, 1] = 7
    assert array[0, 1] == 7
    array[2, 2] = 9
    assert result[2, 2] == 9


def test_to_torch_memory_outlives_the_array():
    array = np.full((64, 33), 3, bfloat16)
    result = arrays.to_torch(array)
    del array
    gc.collect()
    clutter = [np.full((64, 33), 255, np.uint16) for _ in range(20)]
    assert (result == 3).all()
    assert len(clutter) == 20


def test_to_torch_takes_read_only_empty_and_scalar_arrays():
    readonly = np.arange(4, dtype=np.float32)
    readonly.flags.writeable = False
    assert arrays.to_torch(readonly).tolist() == [0, 1, 2, 3]
    assert arrays.to_torch(np.zeros((3, 0), bfloat16)).shape == (3, 0)
    assert arrays.to_torch(np.full((), 2, bfloat16)).item() == 2


def test_to_torch_refuses_what_torch_cannot_hold():
    with pytest.raises(ValueError, match="negative strides"):
        arrays.to_torch(np.arange(4, dtype=np.float32)[::-1])
    with pytest.raises(TypeError, match="torch has no dtype for"):
        arrays.to_torch(np.zeros(3, ml_dtypes.float8_e4m3fn))
    with pytest.raises(TypeError, match="expected an adopted"):
        arrays.to_torch(torch.zeros(3))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch._efficientzerotensor(3), "has no memory, it is zero"),
        (lambda: torch.zeros(3, dtype=torch.complex64).conj(), r"resolve_conj\(\)"),
        (lambda: torch.zeros(3, dtype=torch.complex64).conj().imag, r"resolve_neg\(\)"),
        (lambda: torch.eye(3).to_sparse(), "sparse_coo"),
        (lambda: torch.zeros(3, device="meta"), "meta"),
    ],
)
def test_torch_refusals_name_the_argument(make, reason):
    for function in (exporter, adopt):
        with pytest.raises(TypeError, match=f"k_pe: .*{reason}"):
            function(make(), "k_pe")


def test_torch_dtypes_that_numpy_lacks_are_refused():
    with pytest.warns(UserWarning, match="ComplexHalf"):
        half = torch.zeros(3, dtype=torch.complex32)
    with pytest.raises(TypeError, match=r"k_pe: torch.complex32 tensors are not supported"):
        adopt(half, "k_pe")


def test_tensors_without_memory_are_refused():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        fakes = [torch.empty(3, dtype=torch.bfloat16), torch.empty(3)]
    for fake in fakes:
        with pytest.raises(TypeError, match=r"q_nope: .*cannot be shared without a copy"):
            adopt(fake, "q_nope")


@pytest.mark.parametrize("name", DTYPES)
def test_torch_kind(name):
    kind = exporter(torch.zeros(3))
    adopted, result = kind.empty((2, 3), DTYPES[name])
    assert isinstance(result, torch.Tensor)
    assert (result.shape, result.dtype) == ((2, 3), getattr(torch, name))
    assert (adopted.shape, adopted.dtype) == ((2, 3), DTYPES[name])
    assert adopted.ctypes.data == result.data_ptr()
    adopted[...] = 5
    assert (result == 5).all()
    assert kind.finish(adopted, result) is result
    exported = kind.export(adopted[:, 1:])
    assert exported.data_ptr() == result[:, 1:].data_ptr()
    assert exported.dtype == result.dtype
    assert kind is exporter(torch.nn.Parameter(torch.zeros(1)))
    assert repr(kind) == "torch on cpu"


def test_torch_kind_takes_names_integers_and_empty_shapes():
    kind = exporter(torch.zeros(3))
    assert kind.empty(4, "bfloat16")[1].shape == (4,)
    assert kind.empty((), "float32")[1].shape == ()
    assert kind.empty((0, 7), "uint8")[0].shape == (0, 7)
    with pytest.raises(TypeError, match="torch has no dtype"):
        kind.empty(4, ml_dtypes.float8_e5m2)


# Without a GPU: CuPy arrays over host memory that no kernel touches.


def test_cupy_arrays_are_known_by_namespace_kind_and_device(cupy):
    source = torch.zeros(5, 3)
    memory = cupy.cuda.UnownedMemory(source.data_ptr(), source.nbytes, source, 1)
    array = cupy.ndarray((5, 3), np.float32, cupy.cuda.MemoryPointer(memory, 0))
    assert arrays.address(array) == source.data_ptr()
    assert arrays.is_gpu(array)
    assert namespace(array) is cupy
    assert adopt(array) is array
    assert exporter(array) is arrays.Kind.on(1)
    with pytest.raises(TypeError, match=r"mixed namespaces: numpy \(array 0\) and cupy"):
        namespace(np.zeros(1), array)
    with pytest.raises(ValueError, match="mixed devices: k_scale is on cuda:1"):
        device_scalar(array[:1, :1], np, name="k_scale")
    with pytest.raises(ValueError, match="mixed devices: table is on cpu, q is on cuda:1"):
        borrow({"table": np.zeros(3), "q": array}).__enter__()


@on_gpu
def test_cupy_arrays_keep_tensors_alive(cupy):
    source = torch.ones(64, 33, device="cuda")
    array = adopt(source)[1:]
    address = source.data_ptr()
    del source
    gc.collect()
    assert torch.zeros(64, 33, device="cuda").data_ptr() != address
    assert bool((array == 1).all())
    del array
    gc.collect()
    assert torch.zeros(64, 33, device="cuda").data_ptr() == address


@on_gpu
@pytest.mark.parametrize("name", TORCH_NAMES)
def test_cuda_tensors_are_shared_both_ways(name, cupy):
    source = tensor(name, (4, 6), "cuda")[1:, ::2]
    array = adopt(source)
    assert isinstance(array, cupy.ndarray)
    assert (array.data.ptr, array.dtype) == (source.data_ptr(), numpy_dtype(name))
    expected = source.contiguous().view(torch.uint8).cpu().numpy().tobytes()
    assert cupy.ascontiguousarray(array.view(f"u{array.itemsize}")).get().tobytes() == expected
    array.view(f"u{array.itemsize}")[...] = 3
    torch.cuda.synchronize()
    assert (adopt(source.contiguous().cpu()).view(f"u{array.itemsize}") == 3).all()
    if name in DTYPES:
        back = arrays.to_torch(array)
        assert (back.data_ptr(), back.dtype) == (source.data_ptr(), source.dtype)
        assert back.stride() == source.stride()


@on_gpu
def test_cuda_results_come_from_the_callers_allocator(cupy):
    source = torch.zeros(3, device="cuda")
    before = torch.cuda.memory_allocated(), cupy.get_default_memory_pool().used_bytes()
    with borrow({"q": source}) as borrowed:
        adopted, result = borrowed.kind.empty((1024, 1024), bfloat16)
    assert torch.cuda.memory_allocated() == before[0] + 2 * 1024**2
    assert cupy.get_default_memory_pool().used_bytes() == before[1]
    assert adopted.data.ptr == result.data_ptr()
    mine = exporter(cupy.zeros(3))
    adopted, result = mine.empty((4, 4), bfloat16)
    assert adopted is result
    assert isinstance(result, cupy.ndarray)


@on_gpu
def test_borrow_runs_on_torchs_stream_and_restores_cupys(cupy):
    mine, theirs = cupy.cuda.Stream(non_blocking=True), torch.cuda.Stream()
    source = torch.zeros(3, device="cuda")
    previous = cupy.cuda.get_current_stream()
    mine.use()
    try:
        with torch.cuda.stream(theirs):
            with borrow({"q": source}):
                assert cupy.cuda.get_current_stream().ptr == theirs.cuda_stream
            assert cupy.cuda.get_current_stream() == mine
            with pytest.raises(KeyError), borrow({"q": source, "k": cupy.zeros(3)}):
                raise KeyError
            with borrow({"k": cupy.zeros(3)}):
                assert cupy.cuda.get_current_stream() == mine
        assert cupy.cuda.get_current_stream() == mine
    finally:
        previous.use()


@on_gpu
def test_torch_on_current_stream(cupy):
    assert arrays.torch_has_cuda()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        assert arrays.current_stream_pointer() == stream.ptr
        with arrays.torch_on_current_stream():
            assert torch.cuda.current_stream().cuda_stream == stream.ptr
    with arrays.torch_on_current_stream():
        assert torch.cuda.current_stream().cuda_stream == arrays.current_stream_pointer()


@on_gpu
def test_borrow_can_be_captured_by_torch(cupy):
    source = torch.ones(1000, device="cuda")
    out = torch.zeros(1000, device="cuda")

    def double():
        with borrow({"x": source, "out": out}) as borrowed:
            cupy.add(borrowed.arrays["x"], borrowed.arrays["x"], out=borrowed.arrays["out"])

    double()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        double()
    source.fill_(4)
    graph.replay()
    torch.cuda.synchronize()
    assert (out == 8).all()


@on_gpu
def test_adopt_follows_torchs_stream(cupy):
    with torch.cuda.stream(torch.cuda.Stream()):
        source = torch.zeros(1 << 20, device="cuda")
        torch.cuda._sleep(50_000_000)
        source.fill_(3)
        array = adopt(source)
        assert float(array.sum()) == 3 * (1 << 20)


@on_gpu
def test_device_scalars_on_a_gpu(cupy):
    half = torch.tensor([2.0], dtype=torch.float16, device="cuda")
    for value in [half, 2, np.float64(2), torch.tensor(2.0), cupy.full((), 2.0)]:
        result = device_scalar(value, cupy)
        assert (result.shape, result.dtype) == ((1,), np.float32)
        assert result.get().tobytes() == np.float32(2).tobytes()
    assert device_scalar(2.0, cupy).data.ptr == device_scalar(np.float64(2), cupy).data.ptr
    ready = torch.tensor(2.0, device="cuda")
    assert device_scalar(ready, cupy).data.ptr == ready.data_ptr()
    with pytest.raises(ValueError, match="mixed devices"):
        device_scalar(ready, np)
    with borrow({"scale": torch.tensor(2.0), "q": ready.expand(3)}) as borrowed:
        assert borrowed.xp is cupy
        assert device_scalar(borrowed.arrays["scale"], cupy).get() == [2]


@on_gpu
def test_the_current_device_stays(cupy):
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device; this needs two")
    source = torch.zeros(3, device="cuda:1")
    for scope in (contextlib.nullcontext(), torch.cuda.device(0)):
        with scope:
            before = torch.cuda.current_device()
            with borrow({"q": source}) as borrowed:
                assert cupy.cuda.runtime.getDevice() == 1
                borrowed.arrays["q"][...] = 3
                adopted, result = borrowed.kind.empty(4, "bfloat16")
                assert adopted.data.device_id == result.device.index == 1
            adopt(source)
            assert torch.cuda.current_device() == before == cupy.cuda.runtime.getDevice()
    with pytest.raises(ValueError, match="mixed devices: q is on cuda:1, k is on cuda:0"):
        borrow({"q": source, "k": torch.zeros(3, device="cuda:0")}).__enter__()
