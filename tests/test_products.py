"""Matrix products on every target, of views as the layer has them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_models import back, put

from sandbox.arrays import DTYPES
from sandbox.kernels import cublas, linear
from sandbox.kernels.products import matmul

PLACES = ["numpy", pytest.param("cupy", marks=pytest.mark.gpu)]
BOUNDS = {"float32": 3e-6, "float16": 2e-3, "bfloat16": 1.6e-2}


places = pytest.mark.parametrize("place", PLACES)
dtypes = pytest.mark.parametrize("dtype", BOUNDS)


def drawn(rng, *shape, dtype="float32", scale=1.0):
    return (rng.standard_normal(shape, np.float32) * np.float32(scale)).astype(DTYPES[dtype])


def check(out, want, dtype):
    got, rms = back(out).astype(np.float64), np.sqrt(np.mean(want**2))
    assert np.isfinite(got).all()
    assert np.abs(got - want).max() < BOUNDS[dtype] * max(rms, np.abs(want).max())


@places
@dtypes
@pytest.mark.parametrize("tokens", [0, 1, 3, 70])
def test_projections_of_columns_into_columns(place, dtype, tokens, rng):
    wide = drawn(rng, tokens, 51, dtype=dtype)
    weight = drawn(rng, 29, 60, dtype=dtype, scale=0.2)
    target = put(np.full((tokens, 40), np.nan, DTYPES[dtype]), place)
    x, w, out = put(wide, place)[:, 3:40], put(weight, place)[:, 10:47], target[:, 5:34]
    linear(x, w, out=out, variant="blas")
    want = wide[:, 3:40].astype(np.float64) @ weight[:, 10:47].astype(np.float64).T
    if tokens:
        check(out, want, dtype)
    bias = drawn(rng, 29, dtype=dtype)
    linear(x, w, bias=put(bias, place), out=out, variant="blas")
    if tokens:
        check(out, want + bias.astype(np.float64), dtype)
        assert np.isnan(back(target)[:, :5].astype(np.float32)).all()
        assert np.isnan(back(target)[:, 34:].astype(np.float32)).all()


@places
@dtypes
@pytest.mark.parametrize("tokens", [1, 2, 33])
def test_products_a_head(place, dtype, tokens, rng):
    """The absorption of queries and the projection of values, on views of one kv_b_proj."""
    N, P, L, V, R = 5, 12, 21, 10, 6
    q = drawn(rng, tokens, N, P + R, dtype=dtype)
    kv_b = drawn(rng, N, P + V, L, dtype=dtype, scale=0.2)
    ql_nope = put(np.full((tokens, N, L), np.nan, DTYPES[dtype]), place)
    w = put(kv_b, place)
    matmul(put(q, place)[..., :P].swapaxes(0, 1), w[:, :P], ql_nope.swapaxes(0, 1))
    absorbed = np.einsum("tnp,npl->tnl", q[..., :P].astype(float), kv_b[:, :P].astype(float))
    check(ql_nope, absorbed, dtype)
    out = put(np.full((tokens, N, V), np.nan, DTYPES[dtype]), place)
    matmul(ql_nope.swapaxes(0, 1), w[:, P:].swapaxes(1, 2), out.swapaxes(0, 1))
    latent = back(ql_nope).astype(float)
    check(out, np.einsum("tnl,nvl->tnv", latent, kv_b[:, P:].astype(float)), dtype)


@places
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_any_shapes_and_orders(place, data):
    sizes = st.integers(1, 9)
    m, k, n, batch = (data.draw(sizes) for _ in range(4))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    a, b = drawn(rng, batch, m, k), drawn(rng, batch, k, n)

    def stored(array):
        """On the device, its last two axes contiguous the one way or the other."""
        if data.draw(st.booleans()):
            return put(np.ascontiguousarray(array), place)
        return put(np.ascontiguousarray(array.swapaxes(-1, -2)), place).swapaxes(-1, -2)

    out = put(rng.standard_normal((batch, m, n)).astype(np.float32), place)
    before = back(out).astype(np.float64)
    accumulate = data.draw(st.booleans())
    matmul(stored(a), stored(b), out, accumulate=accumulate)
    want = a.astype(np.float64) @ b.astype(np.float64) + before * accumulate
    assert np.abs(back(out) - want).max() < 1e-4


@pytest.mark.gpu
def test_products_are_captured_and_replayed(rng):
    import cupy

    x, w = put(drawn(rng, 3, 37), "cupy"), put(drawn(rng, 29, 37), "cupy")
    out = cupy.empty((3, 29), np.float32)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        linear(x, w, out=out, variant="blas")
        stream.begin_capture()
        linear(x, w, out=out, variant="blas")
        graph = stream.end_capture()
        x *= 2
        out[...] = np.nan
        graph.launch(stream)
        stream.synchronize()
    assert cupy.abs(out - x @ w.T).max() < 1e-4


@pytest.mark.gpu
def test_the_librarys_version():
    assert int(cublas.version().split(".")[0]) >= 12
