"""What is special to the norm: its two roundings, hostile rows, memory, refusals."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from variants_here import here

from sandbox.arrays import bfloat16
from sandbox.kernels import cuda, rms_norm
from sandbox.kernels.conformance import bits_of
from sandbox.kernels.rms_norm.raw_vector import MOST_LANES, shares

each = pytest.mark.parametrize("variant", here(rms_norm))
raw = pytest.mark.parametrize("variant", here(rms_norm, ["cuda"]))


def rows(tokens=5, columns=40, dtype=bfloat16, seed=0):
    """Rows of a wider array, and a weight."""
    rng = np.random.default_rng(seed)
    wide = np.full((tokens, columns + 24), np.nan, dtype)
    x = wide[:, 8 : 8 + columns]
    x[...] = (3 * rng.standard_normal((tokens, columns), np.float32)).astype(dtype)
    weight = 1 + 0.5 * rng.standard_normal(columns, np.float32)
    return x, weight.astype(dtype)


def normal(x, weight, eps):
    """The two roundings by hand, in float64 in between."""
    values = x.astype(np.float64)
    scaled = values / np.sqrt((values**2).mean(-1, keepdims=True) + eps)
    rounded = scaled.astype(x.dtype).astype(np.float64)
    return (rounded * weight.astype(np.float64)).astype(x.dtype)


@each
class TestRounding:
    @pytest.mark.parametrize("dtype", [np.float16, bfloat16])
    def test_is_done_before_the_weight_and_after_it(self, variant, dtype):
        """Bit for bit but where the sum's last bits decide; one rounding shows in a quarter."""
        x, weight = rows(5, 40, dtype)
        got, want = rms_norm(x, weight, eps=0.1, variant=variant), normal(x, weight, 0.1)
        different = (bits_of(got) != bits_of(want)).mean()
        assert different <= 0.01
        values = x.astype(np.float64)
        once = values / np.sqrt((values**2).mean(-1, keepdims=True) + 0.1) * weight.astype(float)
        assert (bits_of(once.astype(dtype)) != bits_of(want)).mean() > 0.2

    def test_is_that_of_hugging_face(self, variant):
        torch = pytest.importorskip("torch")
        modeling = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
        x, weight = (torch.from_numpy(a.astype(np.float32)).bfloat16() for a in rows())
        norm = modeling.DeepseekV3RMSNorm(40, eps=1e-3)
        norm.weight = torch.nn.Parameter(weight)
        got, want = rms_norm(x, norm.weight, eps=1e-3, variant=variant), norm(x)
        assert isinstance(got, torch.Tensor)
        assert (got != want).float().mean() <= 0.01
        torch.testing.assert_close(got, want, rtol=2**-6, atol=0)


@each
class TestRows:
    def test_nan_and_infinity_stay_in_their_row(self, variant):
        x, weight = rows()
        want = rms_norm(x, weight, variant=variant)
        x[1, 7], x[3, 2] = np.nan, np.inf
        got = rms_norm(x, weight, variant=variant).astype(np.float32)
        assert np.isnan(got[1]).all()
        assert np.flatnonzero(np.isnan(got[3])).tolist() == [2]
        assert not got[3][np.arange(40) != 2].any()
        np.testing.assert_array_equal(bits_of(want[::2]), bits_of(got[::2].astype(bfloat16)))

    def test_of_zeros(self, variant):
        x, weight = rows()
        x[2] = 0
        assert not rms_norm(x, weight, variant=variant)[2].any()
        got = rms_norm(x, weight, eps=0, variant=variant).astype(np.float32)
        assert np.isnan(got[2]).all()
        assert np.isfinite(got[[0, 1, 3, 4]]).all()

    def test_too_large_for_a_float32_become_zero(self, variant):
        x, weight = rows(3)
        x[1] = np.float32(1e25)
        got = rms_norm(x, weight, variant=variant)
        assert not got[1].any()
        np.testing.assert_array_equal(bits_of(got[0]), bits_of(normal(x[:1], weight, 1e-6)[0]))

    def test_so_small_that_eps_decides(self, variant):
        x, weight = rows(4, dtype=np.float32)
        x *= np.float32(1e-6)
        got = rms_norm(x, weight, eps=4e-12, variant=variant)
        np.testing.assert_allclose(got, normal(x, weight, 4e-12), rtol=2e-6)

    @pytest.mark.parametrize("shape", [(0, 40), (1, 1), (3, 40)])
    def test_of_any_number(self, variant, shape):
        x, weight = rows(*shape)
        got = rms_norm(x, weight, variant=variant)
        assert got.shape == shape
        want = normal(x, weight, 1e-6).astype(np.float32)
        np.testing.assert_allclose(got.astype(np.float32), want, rtol=2**-6)

    def test_give_the_same_bits_at_every_place(self, variant):
        x, weight = rows(dtype=np.float32)
        x[...] = x[2]
        got = rms_norm(x, weight, variant=variant)
        assert (bits_of(got) == bits_of(got[0])).all()

    def test_four_gigabytes_apart(self, variant):
        x, weight = rows(2)
        stride = 2**31 + 128
        memory = np.zeros(stride + 128, np.uint16).view(bfloat16)
        far = np.lib.stride_tricks.as_strided(memory, (2, 40), (2 * stride, 2))
        far[...] = x
        want = rms_norm(x, weight, variant=variant)
        assert rms_norm(far, weight, out=far, variant=variant) is far
        np.testing.assert_array_equal(bits_of(far), bits_of(want))


@each
class TestMemory:
    def test_in_place_and_into_rows_with_padding(self, variant):
        x, weight = rows()
        before, want = x.copy(), rms_norm(x, weight, variant=variant)
        wide = np.full((5, 64), 7, bfloat16)
        assert rms_norm(x, weight, out=wide[:, 16:56], variant=variant) is not None
        np.testing.assert_array_equal(bits_of(x), bits_of(before))
        np.testing.assert_array_equal(bits_of(wide[:, 16:56]), bits_of(want))
        wide[:, 16:56] = 7
        assert (wide == 7).all()
        assert rms_norm(x, weight, out=x, variant=variant) is x
        np.testing.assert_array_equal(bits_of(x), bits_of(want))
        assert np.isnan(x.base[:, :8].astype(np.float32)).all()
        assert np.isnan(x.base[:, 48:].astype(np.float32)).all()

    def test_between_the_columns_of_x(self, variant):
        """Neighbours in one projection share no memory, whatever their bounds say."""
        x, weight = rows(columns=16)
        fused = np.zeros((5, 48), bfloat16)
        fused[:, 16:32] = x
        got = rms_norm(fused[:, 16:32], weight, out=fused[:, 32:], variant=variant)
        np.testing.assert_array_equal(got, rms_norm(x, weight, variant="reference"))
        assert not fused[:, :16].any()


@raw
def test_more_rows_than_a_block_has_and_a_row_of_several_warps(variant):
    for tokens, columns in ((19, 40), (2, 776)):
        x, weight = rows(tokens, columns)
        want = normal(x, weight, 1e-6)
        with cuda.host_options(checked=True, seed=2, global_races=True):
            got = rms_norm(x, weight, variant=variant)
        assert (bits_of(got) != bits_of(want)).mean() <= 0.01


@given(vectors=st.integers(1, 8192))
@settings(max_examples=200, deadline=None)
def test_threads_of_raw_vector_have_the_whole_row(vectors):
    lanes, per_lane = shares(vectors)
    assert lanes * per_lane >= vectors
    assert lanes in (1, 2, 4, 8, 16) or lanes in range(32, MOST_LANES + 1, 32)
    assert per_lane in (1, 2, 4, 8)
    idle = lanes * per_lane - vectors
    assert idle < max(32 * per_lane, vectors)


@pytest.mark.parametrize("columns", [40_000, 8_193])
def test_raw_vector_refuses_rows_that_no_block_holds(columns):
    x = np.zeros((1, columns), bfloat16 if columns % 2 else np.float32)
    reason = rms_norm.variants["raw_vector"].refuses({"x": x, "weight": x[0], "out": x.copy()})
    assert "does not fit" in reason


X, WEIGHT = rows(dtype=np.float32)
BUFFER = np.zeros((6, 64), np.float32)
GOOD = {"x": X, "weight": WEIGHT}


@pytest.mark.parametrize(
    ("change", "error", "names"),
    [
        ({"x": None}, TypeError, "x is missing"),
        ({"x": X[0]}, ValueError, "x has shape"),
        ({"x": X.astype(np.float64)}, TypeError, "x is float64"),
        ({"x": X[:, :0], "weight": WEIGHT[:0]}, ValueError, "D must be positive"),
        ({"x": BUFFER[:, ::2], "weight": np.ones(32, np.float32)}, ValueError, "x has a last axis"),
        ({"weight": None}, TypeError, "weight is missing"),
        ({"weight": X}, ValueError, "weight has shape"),
        ({"weight": WEIGHT[:-1]}, ValueError, "weight has shape"),
        ({"weight": WEIGHT.astype(bfloat16)}, TypeError, "weight is bfloat16"),
        ({"weight": np.ones(80, np.float32)[::2]}, ValueError, "weight has a last axis"),
        ({"eps": -1e-6}, ValueError, "eps is -1e-06"),
        ({"eps": np.nan}, ValueError, "eps is nan"),
        ({"eps": 1e39}, ValueError, "eps is 1e\\+39"),
        ({"eps": True}, TypeError, "eps is bool"),
        ({"eps": np.ones(1, np.float32)}, TypeError, "eps is ndarray"),
        ({"out": np.ones((5, 40), bfloat16)}, TypeError, "out is bfloat16"),
        ({"out": np.ones((4, 40), np.float32)}, ValueError, "out has shape"),
        ({"out": np.ones((5, 80), np.float32)[:, ::2]}, ValueError, "out has a last axis"),
        ({"out": np.ones((1, 40), np.float32).repeat(5, 0)[::-1]}, ValueError, "out has strides"),
        ({"out": X.base[:, 9:49]}, ValueError, "out shares memory with x"),
        ({"x": BUFFER[:5, :40], "out": BUFFER[1:, :40]}, ValueError, "out shares memory with x"),
        ({"weight": BUFFER[0, :40], "out": BUFFER[:5, 8:48]}, ValueError, "memory with weight"),
    ],
)
def test_bad_arguments_are_named(change, error, names):
    arguments = {**GOOD, **change}
    before = {name: np.array(value) for name, value in arguments.items()}
    with pytest.raises(error, match=names):
        rms_norm(**arguments)
    for name, value in arguments.items():
        np.testing.assert_array_equal(np.array(value), before[name])
