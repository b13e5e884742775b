"""Tensor-core wrappers and asynchronous copies: the same on the host runner and on a GPU."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from variants_here import needs_host

from sandbox.kernels.cuda import CudaKernel, KernelFault, host_options

SOURCE = Path(__file__).with_name("kernels") / "mma.cu"
BF16 = np.dtype(ml_dtypes.bfloat16)
GROUP, PLACE = np.divmod(np.arange(32), 4)


@pytest.fixture(
    params=[
        pytest.param("host", marks=needs_host),
        pytest.param("checked", marks=needs_host),
        pytest.param("gpu", marks=pytest.mark.gpu),
    ]
)
def run(request):
    """Launches a kernel of one block on NumPy arrays, of which it writes the first."""

    def launch(entry, threads, arrays, *numbers, shared_bytes=0, seed=None, **macros):
        kernel = CudaKernel(SOURCE, entry, min_cc=(8, 0))
        if request.param == "gpu":
            cupy = pytest.importorskip("cupy")
            on_device = [cupy.asarray(array) for array in arrays]
            kernel(1, threads, *on_device, *numbers, macros=macros, shared_bytes=shared_bytes)
            arrays[0][...] = on_device[0].get()
        else:
            with host_options(checked=request.param == "checked", seed=seed):
                kernel(1, threads, *arrays, *numbers, macros=macros, shared_bytes=shared_bytes)

    return launch


def packed(pairs: np.ndarray) -> np.ndarray:
    """Registers of two 16-bit elements each."""
    return np.ascontiguousarray(pairs).view(np.uint32)[..., 0]


def fragment_a(a: np.ndarray) -> np.ndarray:
    """[16, 16] of 16 bits: four registers a lane, rows g and g + 8, then columns 8 further on."""
    rows = GROUP[:, None] + np.array([0, 8, 0, 8])
    columns = 2 * PLACE[:, None] + np.array([0, 0, 8, 8])
    return packed(a[rows[..., None], columns[..., None] + np.arange(2)])


def fragment_b(b: np.ndarray) -> np.ndarray:
    """[16, 8] of 16 bits: two registers a lane, both of column g."""
    rows = 2 * PLACE[:, None] + np.array([0, 8])
    return packed(b[rows[..., None] + np.arange(2), GROUP[:, None, None]])


def fragment_c(c: np.ndarray) -> np.ndarray:
    """[16, 8] of float: four registers a lane."""
    rows = GROUP[:, None] + np.array([0, 0, 8, 8])
    columns = 2 * PLACE[:, None] + np.array([0, 1, 0, 1])
    return np.ascontiguousarray(c[rows, columns])


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float16)], ids=str)
def test_mma_of_16_bits(run, dtype):
    rng = np.random.default_rng(1)
    a = rng.standard_normal((16, 16)).astype(dtype)
    b = rng.standard_normal((16, 8)).astype(dtype)
    c = rng.standard_normal((16, 8)).astype(np.float32)
    a[3, 5] = 2.0**-20  # subnormal in float16
    d = np.full((32, 4), np.nan, np.float32)
    macros = {"TF32": False, "ELEMENT": dtype, "MATRICES": 1, "TRANSPOSED": False, "BYTES": 4}
    run("product", 32, [d, fragment_a(a), fragment_b(b), fragment_c(c)], **macros)
    expected = a.astype(np.float64) @ b.astype(np.float64) + c
    np.testing.assert_allclose(d, fragment_c(expected), rtol=0, atol=1e-5)


def test_mma_passes_infinities_and_nan(run):
    a, b = np.zeros((16, 16), BF16), np.ones((16, 8), BF16)
    a[0, 0], a[1, 0], a[2, 0] = np.inf, -np.inf, np.nan
    d = np.zeros((32, 4), np.float32)
    macros = {"TF32": False, "ELEMENT": BF16, "MATRICES": 1, "TRANSPOSED": False, "BYTES": 4}
    c = np.zeros((16, 8), np.float32)
    run("product", 32, [d, fragment_a(a), fragment_b(b), fragment_c(c)], **macros)
    expected = np.zeros((16, 8), np.float32)
    expected[:3] = np.array([[np.inf], [-np.inf], [np.nan]])
    np.testing.assert_array_equal(d, fragment_c(expected))


def test_mma_of_tf32(run):
    rng = np.random.default_rng(2)

    def rounded(shape):
        bits = rng.standard_normal(shape).astype(np.float32).view(np.uint32) & 0xFFFFE000
        return bits.view(np.float32)

    a, b = rounded((16, 8)), rounded((8, 8))
    c = rng.standard_normal((16, 8)).astype(np.float32)
    rows, columns = np.array([0, 8, 0, 8]), np.array([0, 0, 4, 4])
    left = a[GROUP[:, None] + rows, PLACE[:, None] + columns].view(np.uint32)
    right = b[PLACE[:, None] + np.array([0, 4]), GROUP[:, None]].view(np.uint32)
    d = np.full((32, 4), np.nan, np.float32)
    macros = {"TF32": True, "MATRICES": 1, "TRANSPOSED": False, "BYTES": 4}
    run("product", 32, [d, left, right, fragment_c(c)], **macros)
    expected = a.astype(np.float64) @ b.astype(np.float64) + c
    np.testing.assert_allclose(d, fragment_c(expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize("matrices", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix(run, matrices, transposed):
    tile = np.arange(8 * matrices * 8, dtype=np.uint16).reshape(matrices, 8, 8)
    registers = np.zeros((32, matrices), np.uint32)
    macros = {"TF32": True, "MATRICES": matrices, "TRANSPOSED": transposed, "BYTES": 4}
    run("load", 32, [registers, tile], **macros)
    seen = tile.swapaxes(1, 2) if transposed else tile
    expected = packed(seen.reshape(matrices, 32, 2)).T
    np.testing.assert_array_equal(registers, expected)


PIPELINE = {"TF32": True, "MATRICES": 1, "TRANSPOSED": False}


@pytest.mark.parametrize("width", [4, 8, 16])
def test_cp_async(run, width):
    threads, steps, last = 32, 5, width - 1
    source = np.random.default_rng(3).integers(1, 255, (steps, threads, width), np.uint8)
    out = np.zeros_like(source)
    macros = {**PIPELINE, "BYTES": width, "MISSING_WAIT": False}
    arrays = [out, source]
    run("pipeline", threads, arrays, steps, last, shared_bytes=3 * threads * width, **macros)
    expected = source.copy()
    expected[-1, :, last:] = 0
    np.testing.assert_array_equal(out, expected)


@needs_host
def test_missing_wait_is_seen():
    threads, steps = 32, 5
    source = np.arange(steps * threads, dtype=np.uint32).view(np.uint8).reshape(steps, threads, 4)
    kernel = CudaKernel(SOURCE, "pipeline")
    macros = {**PIPELINE, "BYTES": 4, "MISSING_WAIT": True}
    out = np.zeros_like(source)
    arguments = (1, threads, out, source, steps, 4)
    kernel(*arguments, macros=macros, shared_bytes=3 * threads * 4)
    assert not np.array_equal(out, source)
    with (
        host_options(checked=True),
        pytest.raises(KernelFault, match=r"cp\.async of .* has not waited"),
    ):
        kernel(*arguments, macros=macros, shared_bytes=3 * threads * 4)


@needs_host
@pytest.mark.parametrize("seed", [None, 1])
def test_copies_of_others_need_a_barrier(seed):
    source = np.arange(64, dtype=np.uint32)
    kernel = CudaKernel(SOURCE, "exchange")
    with host_options(checked=True, seed=seed):
        for missing in (False, True):
            out = np.zeros_like(source)
            macros = {**PIPELINE, "BYTES": 4, "MISSING_WAIT": False, "MISSING_BARRIER": missing}
            if missing:
                with pytest.raises(KernelFault, match=r"race|has written|has not waited"):
                    kernel(1, 64, out, source, macros=macros, shared_bytes=256)
            else:
                kernel(1, 64, out, source, macros=macros, shared_bytes=256)
                np.testing.assert_array_equal(out, source.reshape(-1, 2)[:, ::-1].reshape(-1))
