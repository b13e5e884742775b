"""RoPE's tables: each entry to half a unit, the angles of transformers, YaRN's two temperatures."""

import math
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox.dims import PRESETS
from sandbox.kernels import concat_insert_prefill
from sandbox.kernels.concat_insert.reference import rope as rotate
from sandbox.layers.rope import (
    Rope,
    frequencies,
    half_split_to_interleaved,
    yarn_frequencies,
    yarn_mscale,
)

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402
from transformers.models.deepseek_v3.configuration_deepseek_v3 import (  # noqa: E402
    DeepseekV3Config,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (  # noqa: E402
    DeepseekV3RotaryEmbedding,
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_interleave,
)

DEEPSEEK = {"factor": 40, "beta_fast": 32, "beta_slow": 1}
V3 = {**DEEPSEEK, "mscale": 1.0, "mscale_all_dim": 1.0}
V2 = {**DEEPSEEK, "mscale": 0.707, "mscale_all_dim": 0.707}
K2 = {"factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
RAMP = {"factor", "beta_fast", "beta_slow", "truncate"}
# Width, theta, original context, YaRN's parameters or None.
MODELS = {
    "tiny": (PRESETS["tiny"].R, 10000.0, 512, None),
    "default": (64, 50000.0, 4096, None),
    "deepseek_v3": (64, 10000.0, 4096, V3),
    "kimi_k2": (64, 50000.0, 4096, K2),
    "tiny yarn": (8, 10000.0, 4096, {"factor": 2.5, "mscale": 0.9, "mscale_all_dim": 0.4}),
    "one mscale": (6, 700.0, 100, {"factor": 8}),
    "given": (10, 1e6, 64, {"factor": 3, "attention_factor": 1.25, "truncate": False}),
    "unstretched": (12, 10000.0, 128, {"factor": 1.0}),
}


@cache
def made(model):
    width, theta, original, yarn = MODELS[model]
    if yarn is None:
        return Rope.default(width, original, theta)
    return Rope.yarn(width, theta=theta, original_max_positions=original, **yarn)


def some_positions(rope):
    """None of them 0, where every table is the same; the last one among them."""
    last = len(rope.cos_sin) - 1
    return np.unique(np.minimum([1, 2, 7, 99, 511, 4095, 4096, 65537, last - 1, last], last))


def long_frequencies(width, theta, original, yarn):
    """Frequencies in the longest floating point there is, pair by pair."""
    result = []
    for pair in range(width // 2):
        frequency = np.longdouble(theta) ** (-np.longdouble(2 * pair) / width)
        if yarn:

            def pair_of(turns):
                return width * math.log(original / (2 * math.pi * turns)) / 2 / math.log(theta)

            low = pair_of(yarn.get("beta_fast", 32))
            high = pair_of(yarn.get("beta_slow", 1))
            if yarn.get("truncate", True):
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, width - 1)
            slow = min(max((pair - np.longdouble(low)) / (high - low), 0), 1)
            frequency = frequency * (1 - slow) + frequency / yarn["factor"] * slow
        result.append(frequency)
    return np.array(result)


@pytest.mark.parametrize("model", MODELS)
def test_entries_are_rounded_once(model):
    width, theta, original, yarn = MODELS[model]
    rope = made(model)
    positions = some_positions(rope)
    angles = positions[:, None] * long_frequencies(width, theta, original, yarn)
    factor = 1.0
    if yarn:
        factor = yarn.get("attention_factor") or (
            (0.1 * yarn.get("mscale", 1) * math.log(yarn["factor"]) + 1)
            / (0.1 * yarn.get("mscale_all_dim", 0) * math.log(yarn["factor"]) + 1)
        )
    exact = factor * np.concatenate([np.cos(angles), np.sin(angles)], axis=-1)
    half_unit = np.spacing(np.abs(exact).astype(np.float32)).astype(np.longdouble) / 2
    in_float64 = np.concatenate([angles, angles], axis=-1) * 2.0**-49 + 1e-15
    table = rope.cos_sin[positions]
    assert table.dtype == np.float32
    assert table.shape == (len(positions), width)
    assert (np.abs(table - exact) <= half_unit + in_float64).all()


@pytest.mark.parametrize("model", MODELS)
def test_transformers_has_the_same_angles(model):
    width, theta, original, yarn = MODELS[model]
    parameters = {"rope_type": "default", "rope_theta": theta}
    if yarn:
        scaling = {"rope_type": "yarn", "original_max_position_embeddings": original}
        parameters = {**parameters, **scaling, **yarn}
    config = DeepseekV3Config(qk_rope_head_dim=width, rope_parameters=parameters)
    theirs = DeepseekV3RotaryEmbedding(config)
    if yarn:
        ramp = {name: yarn[name] for name in RAMP & yarn.keys()}
        turns = yarn_frequencies(width, theta=theta, original_max_positions=original, **ramp)
    else:
        turns = frequencies(width, theta)
    their_turns = theirs.inv_freq.numpy().astype(np.float64)
    np.testing.assert_allclose(their_turns, turns, rtol=3e-6)

    rope = made(model)
    positions = some_positions(rope)
    cosine, sine = theirs(torch.zeros(1), torch.from_numpy(positions)[None])
    half = width // 2
    table = np.concatenate([cosine[0, :, :half], sine[0, :, :half]], axis=-1)
    # Their frequencies are in float32, and so is their product with a position.
    angle_error = positions[:, None] * (np.abs(their_turns - turns) + turns * 2.0**-23)
    bound = 2 * np.concatenate([angle_error, angle_error], axis=-1) + 4e-7
    assert (np.abs(table - rope.cos_sin[positions]) <= bound).all()


@settings(max_examples=100, deadline=None, database=None, derandomize=True)
@given(
    width=st.sampled_from([2, 6, 8, 64, 130]),
    theta=st.sampled_from([1.5, 100.0, 10000.0, 1e6]),
    original=st.sampled_from([1, 3, 6, 7, 201, 4096, 1 << 20]),
    factor=st.sampled_from([1, 1.5, 40.0, 64]),
    turns=st.sampled_from([(1, 1), (32, 1), (32.0, 32.0), (7, 0.5), (1e4, 1e-3)]),
    truncate=st.booleans(),
)
def test_ramps_of_any_place(width, theta, original, factor, turns, truncate):
    """Ramps at the ends of the pairs, beyond them, of no length: as transformers makes them."""
    beta_fast, beta_slow = turns
    named = {"factor": factor, "beta_fast": beta_fast, "beta_slow": beta_slow, "truncate": truncate}
    config = SimpleNamespace(
        standardize_rope_params=lambda: None,
        hidden_size=width,
        num_attention_heads=1,
        rope_parameters={
            **named,
            "rope_theta": theta,
            "original_max_position_embeddings": original,
        },
    )
    theirs, _ = ROPE_INIT_FUNCTIONS["yarn"](config)
    ours = yarn_frequencies(width, theta=theta, original_max_positions=original, **named)
    kept = frequencies(width, theta)
    assert ours.shape == (width // 2,)
    assert ((ours <= kept * (1 + 1e-15)) & (ours >= kept / factor * (1 - 1e-15))).all()
    # In float32 the ramp is off by a unit of the pair's number over the ramp's length.
    np.testing.assert_array_less(np.abs(theirs.numpy() - ours), 3e-6 * ours + 2e-6 * kept)


def test_fast_pairs_are_kept_and_slow_ones_stretched():
    kept, ours = frequencies(64), yarn_frequencies(64, factor=40, original_max_positions=4096)
    turns = kept * 4096 / (2 * np.pi)
    fast, slow = turns >= 32, turns <= 1
    ramp = ~fast & ~slow
    assert fast.sum() == 11
    assert slow.sum() == 9
    assert (ours[fast] == kept[fast]).all()
    assert (ours[slow] == kept[slow] / 40).all()
    assert ((ours[ramp] < kept[ramp]) & (ours[ramp] > kept[ramp] / 40)).all()


def test_a_ramp_of_no_length_is_a_step():
    """The context ends before the first pair has turned once: both bounds are pair 0."""
    ours = yarn_frequencies(8, factor=4, original_max_positions=6)
    assert (ours == frequencies(8) / [1, 4, 4, 4]).all()


def test_published_scales():
    v3 = Rope.yarn(64, original_max_positions=4096, max_positions=3, **V3)
    v2 = Rope.yarn(64, original_max_positions=4096, max_positions=3, **V2)
    k2 = Rope.yarn(64, original_max_positions=4096, max_positions=3, theta=50000.0, **K2)
    assert yarn_mscale(40, 1.0) == pytest.approx(1.36889, abs=5e-6)
    assert v3.softmax_factor == pytest.approx(1.873854, abs=5e-7)
    assert PRESETS["deepseek_v3"].softmax_scale * v3.softmax_factor == pytest.approx(
        0.1352338, abs=5e-8
    )
    assert yarn_mscale(40, 0.707) == pytest.approx(1.2608, abs=5e-5)
    assert v2.softmax_factor == pytest.approx(1.58963, abs=5e-6)
    assert k2.softmax_factor == pytest.approx((1 + 0.1 * math.log(32)) ** 2, rel=1e-15)
    for rope in (v3, v2, k2):
        assert (rope.cos_sin[0] == [1] * 32 + [0] * 32).all()  # equal mscales leave the table alone


def test_temperatures_of_table_and_softmax():
    def first_cosine(**given):
        rope = Rope.yarn(8, factor=20, original_max_positions=64, max_positions=2, **given)
        return rope.cos_sin[0, 0], rope.softmax_factor

    tall = 1 + 0.1 * math.log(20)
    assert first_cosine() == (np.float32(tall), 1)
    assert first_cosine(mscale=0) == (1, 1)
    assert first_cosine(mscale_all_dim=1) == (1, pytest.approx(tall**2))
    half = 1 + 0.05 * math.log(20)
    assert first_cosine(mscale_all_dim=0.5) == (np.float32(tall / half), pytest.approx(half**2))
    assert first_cosine(mscale_all_dim=0.5, attention_factor=0.75) == (
        0.75,
        pytest.approx(half**2),
    )
    assert yarn_mscale(1, 3.0) == 1


def test_max_positions():
    def rows(**given):
        return len(Rope.yarn(2, **given).cos_sin)

    assert rows(factor=40, original_max_positions=4096) == 163840
    assert rows(factor=15 / 11, original_max_positions=11) == 15
    assert rows(factor=40, original_max_positions=4096, max_positions=7) == 7
    short, long = (
        Rope.yarn(6, original_max_positions=9, factor=f, max_positions=9) for f in (2, 3)
    )
    assert not np.array_equal(short.cos_sin, long.cos_sin)
    assert Rope.default(2, 5).cos_sin.shape == (5, 2)


def test_linear_reaches_further():
    stretched, plain = Rope.linear(8, 40, factor=4, theta=300.0), Rope.default(8, 10, theta=300.0)
    assert (stretched.cos_sin[::4] == plain.cos_sin).all()
    assert not (stretched.cos_sin[1] == plain.cos_sin[1]).any()
    assert stretched.softmax_factor == 1


def test_scores_depend_on_the_distance_only(rng):
    """Also far out, where angles in float32 would be off by thousandths."""
    rope = made("deepseek_v3")
    q, k = rng.standard_normal((2, 5, 64))
    starts = np.array([0, 3, 4000, 90000, 163000])
    near, far = np.zeros(5, np.int64) + 613, np.zeros(5, np.int64)
    expected = (rotate(q, near, rope.cos_sin) * rotate(k, far, rope.cos_sin)).sum(-1)
    moved = (rotate(q, near + starts, rope.cos_sin) * rotate(k, far + starts, rope.cos_sin)).sum(-1)
    np.testing.assert_allclose(moved, expected, atol=5e-6)
    assert (np.abs(expected - (q * k).sum(-1)) > 0.01).all()


def for_transformers(rope, positions):
    """Its cosines and sines `[T, R]`: a pair's angle stands at both its columns."""
    cosine, sine = np.split(rope.cos_sin[positions].astype(np.float64), 2, axis=-1)
    return (torch.from_numpy(np.tile(part, 2)) for part in (cosine, sine))


@pytest.mark.parametrize("width", [4, 8, 64])
def test_weights_of_half_split_models(rng, width):
    """Half-split rotation, and interleaved rotation of the same rows in the other order."""
    rope = Rope.default(width, 1000, theta=100.0, interleaved=False)
    assert not rope.interleaved
    positions = np.array([1, 17, 998, 999])
    hidden, weights = rng.standard_normal((4, 5)), rng.standard_normal((2, width, 5))
    pair = (torch.from_numpy(hidden @ weight.T) for weight in weights)
    cosine, sine = for_transformers(rope, positions)
    q, k = (x[0].numpy() for x in apply_rotary_pos_emb(*pair, cosine, sine, unsqueeze_dim=0))
    expected = q @ k.T

    def interleaved_scores(weights):
        q, k = (rotate(hidden @ weight.T, positions, rope.cos_sin) for weight in weights)
        return q @ k.T

    index = half_split_to_interleaved(width)
    assert index.dtype == np.int64
    ours = interleaved_scores(weights[:, index])
    np.testing.assert_allclose(ours, expected, rtol=1e-12, atol=1e-12)
    assert np.abs(interleaved_scores(weights) - expected).max() > 0.1


def test_interleaved_weights_are_deepseeks(rng):
    """Transformers leaves the rotated columns in another order; scores are the same."""
    rope = Rope.default(8, 1000)
    positions = np.array([3, 40, 999])
    q, k = rng.standard_normal((2, 3, 8))
    pair = torch.from_numpy(q), torch.from_numpy(k)
    cosine, sine = for_transformers(rope, positions)
    theirs = apply_rotary_pos_emb_interleave(*pair, cosine, sine, unsqueeze_dim=0)
    their_q, their_k = (x[0].numpy() for x in theirs)
    ours_q, ours_k = (rotate(x, positions, rope.cos_sin) for x in (q, k))
    np.testing.assert_allclose(ours_q @ ours_k.T, their_q @ their_k.T, rtol=1e-12)
    index = half_split_to_interleaved(8)
    np.testing.assert_allclose(ours_q, their_q[:, index], rtol=1e-12)
    assert index.tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


@pytest.mark.parametrize("variant", ["reference", "torch"])
def test_ops_take_the_table(rng, variant):
    """It is read-only, and they only read it."""
    rope = Rope.default(8, 30)
    q, k_nope = rng.standard_normal((2, 3, 14)), rng.standard_normal((2, 3, 6))
    kv_c, k_pe = rng.standard_normal((2, 5)), rng.standard_normal((2, 8))
    arrays = [x.astype(np.float32) for x in (q, k_nope, k_pe, kv_c, np.full((2, 4, 13), np.nan))]
    positions = np.array([29, 11])
    before = rope.cos_sin.tobytes()
    q_out, k_out = concat_insert_prefill(
        *arrays, np.array([6, 1]), positions=positions, cos_sin=rope.cos_sin, variant=variant
    )
    turned = rotate(arrays[0][..., 6:], positions, rope.cos_sin)
    np.testing.assert_allclose(q_out[..., 6:], turned, rtol=1e-5, atol=1e-6)
    key = rotate(arrays[2], positions, rope.cos_sin)
    np.testing.assert_allclose(k_out[:, 2, 6:], key, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(arrays[4][1, 2, 5:], key[0], rtol=1e-5, atol=1e-6)
    assert rope.cos_sin.tobytes() == before


def test_a_table_of_ones_own():
    mine = np.ones((5, 8), np.float32)
    rope = Rope(mine, softmax_factor=2.5)
    assert np.shares_memory(rope.cos_sin, mine)
    assert rope.interleaved
    with pytest.raises(ValueError, match="read-only"):
        rope.cos_sin[0, 0] = 2
    mine[0, 0] = 3  # the owner's array is as writable as it was
    with pytest.raises(AttributeError, match="softmax_factor"):
        rope.softmax_factor = 1.0
    assert {rope: 1}[rope] == 1  # hashable, by identity: a layer may cache what it made of it
    assert rope != Rope(mine, softmax_factor=2.5)


@pytest.mark.parametrize(
    ("table", "error", "words"),
    [
        ([[1.0, 0.0]], TypeError, "cos_sin is list"),
        (np.ones((3, 8)), TypeError, "cos_sin is float64"),
        (np.ones(8, np.float32), ValueError, r"shape \(8,\)"),
        (np.ones((3, 7), np.float32), ValueError, r"\(3, 7\)"),
        (np.ones((0, 8), np.float32), ValueError, r"\(0, 8\)"),
        (np.ones((3, 0), np.float32), ValueError, r"\(3, 0\)"),
    ],
)
def test_refused_tables(table, error, words):
    with pytest.raises(error, match=words):
        Rope(table)


@pytest.mark.parametrize("factor", [0, -1.0, math.nan, math.inf, "2"])
def test_refused_softmax_factors(factor):
    with pytest.raises(ValueError, match="softmax_factor"):
        Rope(np.ones((3, 8), np.float32), softmax_factor=factor)


@pytest.mark.parametrize(
    ("name", "values"),
    {
        "width": [7, 0, -2, 8.0, True],
        "max_positions": [0, -1, 2.5, "8", True],
        "theta": [1, 0, -3.0, math.nan, math.inf, "10000"],
        "factor": [0.99, -2, math.nan, math.inf, None, True],
        "original_max_positions": [0, 4096.5, None],
        "beta_slow": [0, -1, math.nan],
        "beta_fast": [0.5, math.inf, "32"],
        "mscale": [-0.1, math.nan, None],
        "mscale_all_dim": [-0.1, math.nan, None],
        "attention_factor": [0, -1.0, math.nan],
    }.items(),
)
def test_refused_numbers(name, values):
    good = {"factor": 2, "original_max_positions": 8, "max_positions": 4, "width": 8}
    Rope.yarn(**good)
    for value in values:
        with pytest.raises(ValueError, match=rf"^{name} is {value!r}, expected"):
            Rope.yarn(**{**good, name: value})
        if name in ("width", "max_positions", "theta"):
            with pytest.raises(ValueError, match=f"^{name} is"):
                Rope.default(**{"width": 8, "max_positions": 4, name: value})
        if name == "factor":
            with pytest.raises(ValueError, match=r"^factor is"):
                Rope.linear(8, 4, factor=value)


@pytest.mark.parametrize("width", [3, -2, 8.0])
def test_refused_widths_of_an_order(width):
    with pytest.raises(ValueError, match=r"^width is"):
        half_split_to_interleaved(width)
    assert half_split_to_interleaved(0).shape == (0,)
