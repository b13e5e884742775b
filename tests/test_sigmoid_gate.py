"""What is special to the gate: zeros, infinite and large gates, memory, refusals."""

import numpy as np
import pytest
from variants_here import here

from sandbox.arrays import bfloat16
from sandbox.kernels import sigmoid_gate
from sandbox.kernels.conformance import bits_of

INF, NAN = np.inf, np.nan


each = pytest.mark.parametrize("variant", here(sigmoid_gate))
floats = pytest.mark.parametrize("dtype", [np.float32, np.float16, bfloat16])


def pair(shape=(5, 48), dtype=bfloat16, seed=0):
    """x, and gates as columns of a wider projection."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape, np.float32).astype(dtype)
    wide = np.full((shape[0], shape[1] + 24), np.nan, dtype)
    gate = wide[:, 16 : 16 + shape[1]]
    gate[...] = (4 * rng.standard_normal(shape, np.float32)).astype(dtype)
    return x, gate


def product(x, gate):
    with np.errstate(over="ignore"):
        return x.astype(np.float64) / (1 + np.exp(-gate.astype(np.float64)))


@each
class TestValues:
    @floats
    @pytest.mark.parametrize("zero", [0.0, -0.0])
    def test_zero_stays_zero_whatever_its_gate(self, variant, dtype, zero):
        gates = np.array([NAN, -NAN, INF, -INF, 6e4, -6e4, 1.5, 0.0], np.float32).astype(dtype)
        x = np.full((3, 8), 1, dtype)
        x[1] = zero
        got = sigmoid_gate(x, np.stack([gates] * 3), variant=variant)
        np.testing.assert_array_equal(bits_of(got[1]), bits_of(x[1]))
        assert np.isnan(got[[0, 2], :2].astype(np.float32)).all()
        assert np.isfinite(got[:, 2:].astype(np.float32)).all()

    @floats
    def test_extreme_gates_are_factors_of_one_and_zero(self, variant, dtype):
        x = pair(dtype=dtype)[0]
        for gate in (30, 500, 6e4, INF):
            got = sigmoid_gate(x, np.full_like(x, gate), variant=variant)
            np.testing.assert_array_equal(bits_of(got), bits_of(x))
        for gate in (-200, -6e4, -INF):
            assert not sigmoid_gate(x, np.full_like(x, gate), variant=variant).any()

    @floats
    def test_each_element_is_rounded_once(self, variant, dtype):
        x, gate = pair((4, 48), dtype)
        got, want = sigmoid_gate(x, gate, variant=variant), product(x, gate)
        ulp = {2: {"float16": 2.0**-10, "bfloat16": 2.0**-7}.get(got.dtype.name), 4: 2.0**-23}
        least = 2.0**-24 if got.dtype == np.float16 else 0
        exponent = np.exp2(np.floor(np.log2(np.abs(want))))
        allowed = (0.5 + 1e-2 if got.dtype.itemsize == 2 else 6) * ulp[got.dtype.itemsize]
        assert (np.abs(got.astype(np.float64) - want) <= allowed * exponent + least).all()

    def test_nan_and_infinity_of_x(self, variant):
        x, gate = pair(dtype=np.float32)
        x[2, :3] = NAN, INF, -INF
        got = sigmoid_gate(x, gate, variant=variant)
        assert np.isnan(got).sum() == 1
        assert got[2, 1] == INF
        assert got[2, 2] == -INF

    @pytest.mark.parametrize("shape", [(0, 48), (1, 1), (9, 51), (2, 2051)])
    def test_of_any_shape(self, variant, shape):
        x, gate = pair(shape)
        got = sigmoid_gate(x, gate, variant=variant)
        assert got.shape == shape
        np.testing.assert_allclose(got.astype(np.float64), product(x, gate), rtol=2**-8)

    def test_rows_four_gigabytes_apart(self, variant):
        x, gate = pair((2, 48))
        stride = 2**31 + 128
        memory = np.zeros(stride + 128, np.uint16).view(bfloat16)
        far = np.lib.stride_tricks.as_strided(memory, (2, 48), (2 * stride, 2))
        far[...] = gate
        want = sigmoid_gate(x, gate, variant=variant)
        assert sigmoid_gate(x, far, out=far, variant=variant) is far
        np.testing.assert_array_equal(bits_of(far), bits_of(want))


@each
class TestMemory:
    def test_in_place_on_either_side_and_into_padded_rows(self, variant):
        x, gate = pair()
        want, before = sigmoid_gate(x, gate, variant=variant), (x.copy(), gate.copy())
        wide = np.full((5, 72), 7, bfloat16)
        sigmoid_gate(x, gate, out=wide[:, 8:56], variant=variant)
        np.testing.assert_array_equal(bits_of(wide[:, 8:56]), bits_of(want))
        wide[:, 8:56] = 7
        assert (wide == 7).all()
        for array, old in zip((x, gate), before):
            np.testing.assert_array_equal(bits_of(array), bits_of(old))
        assert sigmoid_gate(x, gate, out=gate, variant=variant) is gate
        np.testing.assert_array_equal(bits_of(gate), bits_of(want))
        np.testing.assert_array_equal(bits_of(x), bits_of(before[0]))
        assert np.isnan(gate.base[:, :16].astype(np.float32)).all()
        assert np.isnan(gate.base[:, 64:].astype(np.float32)).all()
        assert sigmoid_gate(x, before[1], out=x, variant=variant) is x
        np.testing.assert_array_equal(bits_of(x), bits_of(want))

    def test_one_array_for_all_three(self, variant):
        x = pair()[0]
        want = product(x, x)
        got = sigmoid_gate(x, x, out=x, variant=variant)
        np.testing.assert_allclose(got.astype(np.float64), want, rtol=2**-8)

    def test_torch_tensors(self, variant):
        torch = pytest.importorskip("torch")
        x, gate = (torch.from_numpy(a.astype(np.float32)).bfloat16() for a in pair())
        got = sigmoid_gate(x, gate, variant=variant)
        want = x.float() * gate.float().sigmoid()
        torch.testing.assert_close(got.float(), want, rtol=2**-8, atol=0)


X, GATE = pair(dtype=np.float32)
BUFFER = np.zeros((6, 64), np.float32)


@pytest.mark.parametrize(
    ("change", "error", "names"),
    [
        ({"x": None}, TypeError, "x is missing"),
        ({"x": X[0]}, ValueError, "x has shape"),
        ({"x": X.astype(np.float64)}, TypeError, "x is float64"),
        ({"x": X[:, :0], "gate": X[:, :0]}, ValueError, "W must be positive"),
        ({"x": BUFFER[:5].T[:48]}, ValueError, "x has a last axis"),
        ({"gate": GATE.astype(bfloat16)}, TypeError, "gate is bfloat16"),
        ({"gate": GATE[:4]}, ValueError, "gate has shape"),
        ({"gate": np.zeros((5, 96), np.float32)[:, ::2]}, ValueError, "gate has a last axis"),
        ({"out": X.astype(bfloat16)}, TypeError, "out is bfloat16"),
        ({"out": X[:, :47].copy()}, ValueError, "out has shape"),
        ({"out": X.copy()[::-1]}, ValueError, "out has strides"),
        ({"out": GATE.base[:, 15:63]}, ValueError, "out shares memory with gate"),
        ({"x": BUFFER[:5, :48], "out": BUFFER[1:, :48]}, ValueError, "out shares memory with x"),
    ],
)
def test_bad_arguments_are_named(change, error, names):
    arguments = {"x": X, "gate": GATE, **change}
    before = {name: np.array(value) for name, value in arguments.items()}
    with pytest.raises(error, match=names):
        sigmoid_gate(**arguments)
    for name, value in arguments.items():
        np.testing.assert_array_equal(np.array(value), before[name])
