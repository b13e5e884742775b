"""8-bit floats: NumPy, CUDA (host and GPU) and Numba agree with ml_dtypes on every input."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from variants_here import needs_host

from sandbox.cache_formats import E4M3, E5M2
from sandbox.kernels import numba_target
from sandbox.kernels.cuda import CudaKernel, host_options
from sandbox.kernels.numba_fp8 import fp8_decode, fp8_encode
from sandbox.kernels.numba_target import cuda

SOURCE = Path(__file__).with_name("cuda_kernels") / "fp8.cu"
KINDS = pytest.mark.parametrize("kind", [E4M3, E5M2], ids=["E4M3", "E5M2"])
NAMES = {E4M3: "E4M3", E5M2: "E5M2"}
CODES = np.arange(256, dtype=np.uint8)


def all_bfloat16() -> np.ndarray:
    return np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)


def hard_values(kind) -> np.ndarray:
    """Every bf16, every code's value and the float32 numbers around each tie between two."""
    finite = np.unique(kind.decode(CODES)[np.isfinite(kind.decode(CODES))])
    ties = ((finite[1:].astype(np.float64) + finite[:-1]) / 2).astype(np.float32)
    around = [np.nextafter(ties, np.float32(x)) for x in (-np.inf, np.inf)]
    values = np.concatenate([all_bfloat16(), finite, ties, *around])
    return np.resize(values, -(-len(values) // 16) * 16)


def expected(kind, values):
    """ml_dtypes rounds as asked, but does not saturate."""
    with np.errstate(invalid="ignore"):
        codes = np.clip(values, -kind.largest, kind.largest).astype(kind.dtype).view(np.uint8)
    return np.where(np.isnan(values), np.uint8(0x7F), codes)


@KINDS
def test_numpy(kind):
    values = hard_values(kind)
    np.testing.assert_array_equal(kind.encode(values), expected(kind, values))
    np.testing.assert_array_equal(kind.decode(CODES), CODES.view(kind.dtype).astype(np.float32))


def test_named_codes():
    values = np.array([0, -0.0, 2**-10, 2**-9, 1.5 * 2**-9, 448, 464, 465, np.inf, np.nan])
    codes = [0x00, 0x80, 0x00, 0x01, 0x02, 0x7E, 0x7E, 0x7E, 0x7E, 0x7F]
    assert E4M3.encode(values.astype(np.float32)).tolist() == codes
    assert E5M2.encode(np.float32([57344, 1e9, -np.inf, np.nan])).tolist() == [123, 123, 251, 127]


@KINDS
def test_torch_agrees_where_it_does_not_overflow(kind):
    torch = pytest.importorskip("torch")
    values = hard_values(kind)
    values = values[np.abs(values) <= kind.largest]
    dtype = getattr(torch, kind.dtype.name)
    codes = torch.from_numpy(values).to(dtype).view(torch.uint8).numpy()
    np.testing.assert_array_equal(kind.encode(values), codes)


@KINDS
@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(
    "target",
    [
        pytest.param("host", marks=needs_host),
        pytest.param("checked", marks=needs_host),
        pytest.param("gpu", marks=pytest.mark.gpu),
    ],
)
def test_cuda(kind, count, target):
    values = hard_values(kind)
    codes, back = np.zeros(len(values), np.uint8), np.zeros(256, np.float32)
    _launch("encode", target, values, codes, kind, count)
    np.testing.assert_array_equal(codes, expected(kind, values))
    _launch("decode", target, CODES, back, kind, count)
    np.testing.assert_array_equal(back, kind.decode(CODES))


def _launch(entry, target, source, result, kind, count):
    kernel = CudaKernel(SOURCE, entry)
    macros = {"KIND": NAMES[kind], "COUNT": count}
    blocks = -(-len(source) // (128 * count))
    if target == "gpu":
        cupy = pytest.importorskip("cupy")
        pair = cupy.asarray(source), cupy.asarray(result)
        kernel(blocks, 128, *pair, len(source), macros=macros)
        result[...] = pair[1].get()
    else:
        with host_options(checked=target == "checked"):
            kernel(blocks, 128, source, result, len(source), macros=macros)


@KINDS
@pytest.mark.parametrize("target", ["sim", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_numba(kind, target):
    if reason := numba_target.unavailable_reason(target):
        pytest.skip(reason)
    xp = pytest.importorskip("cupy") if target == "gpu" else np
    values = hard_values(kind)
    if target == "sim":  # all inputs as plain Python, since the simulator takes long for each
        codes = [fp8_encode(kind).py_func(value) for value in values]
        np.testing.assert_array_equal(np.array(codes), expected(kind, values))
        values = values[:: len(values) // 200]
    codes, back = (xp.asarray(x) for x in _through_numba(kind, xp, values))
    np.testing.assert_array_equal(_numpy(codes), expected(kind, values))
    np.testing.assert_array_equal(_numpy(back), kind.decode(CODES))


def _through_numba(kind, xp, values):
    encode, decode = fp8_encode(kind), fp8_decode(kind)

    @cuda.jit
    def both(values, codes, all_codes, back):
        i = cuda.grid(1)
        if i < values.shape[0]:
            codes[i] = encode(values[i])
        if i < all_codes.shape[0]:
            back[i] = decode(all_codes[i])

    codes, back = xp.zeros(len(values), np.uint8), xp.zeros(256, np.float32)
    blocks = -(-max(len(values), 256) // 64)
    arguments = xp.asarray(values), codes, xp.asarray(CODES), back
    numba_target.launch(both, blocks, 64, *arguments)
    return codes, back


def _numpy(array):
    return array if isinstance(array, np.ndarray) else array.get()
