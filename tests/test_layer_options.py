"""Options of the layer that change what it computes, each seen to do so; and what does not fit."""

from dataclasses import replace

import numpy as np
import pytest
from few_lines import mla
from layer_models import Server, assert_close, back, in_chunks, put, put_all, sequences, targets
from test_layer_formats import TILED, rope_for

from sandbox import FORMATS, PRESETS
from sandbox.layers import InProcess, MLALayer, MLAWeights, Rope, random_weights
from sandbox.planner import ContextParallel, plan_step

TINY = PRESETS["tiny"]
ROPE = Rope.default(TINY.R, 64)


def tiny(weights=None, **options):
    weights = random_weights(TINY) if weights is None else weights
    return MLALayer(TINY, weights, **{"rope": ROPE, **options})


def test_eps_is_that_of_both_norms():
    weights, hidden = random_weights(TINY), sequences()
    want = [
        mla(weights, TINY, one, scale=TINY.softmax_scale, cos_sin=ROPE.cos_sin, eps=0.3)[0]
        for one in hidden
    ]
    server = Server(tiny(eps=0.3), hidden)
    in_chunks(server)
    assert_close(server.results(), want, 3e-6)


@pytest.mark.parametrize("rule", ["pow2", "raw"])
def test_tile_scales_are_chosen_as_asked(rule):
    """Prefills and decodes write the bytes of the format's own encoder."""
    weights, rope = random_weights(TILED, seed=3), rope_for(TILED)
    layer = MLALayer(TILED, weights, rope=rope, cache_format="fp8_ds_mla", tile_scale=rule)
    server = Server(layer, sequences((9,)))
    server.step([7])
    server.step([1])
    server.step([1])
    scale = TILED.softmax_scale * rope.softmax_factor
    rows = mla(weights, TILED, server.hidden[0], scale=scale, cos_sin=rope.cos_sin)[1]
    fmt = FORMATS["fp8_ds_mla"]
    want = fmt.encode(rows.astype(np.float32), TILED, tile_scale=rule)
    slots = server.table[0, np.arange(9) // 4] * 4 + np.arange(9) % 4
    written = server.cache.reshape(-1, server.cache.shape[2])[slots]
    assert (written == want).mean() > 0.99
    other = {"pow2": "raw", "raw": "pow2"}[rule]
    assert (written == fmt.encode(rows.astype(np.float32), TILED, tile_scale=other)).mean() < 0.9


@targets
def test_a_scale_in_an_array_may_change(target):
    """A later call writes and reads by the array's new value."""
    scale = put(np.array([0.02], np.float32), target)
    weights = put_all(random_weights(TINY), target)
    layer = tiny(weights, cache_format="fp8_e4m3", k_scale=scale)
    server = Server(layer, sequences(), target)
    server.step([5, 9, 3])
    before = back(server.cache).copy()
    scale[...] = 0.04
    server.done = [0, 0, 0]
    server.step([5, 9, 3])
    fmt = FORMATS["fp8_e4m3"]
    first = fmt.decode(before, TINY, k_scale=0.02)
    second = fmt.decode(back(server.cache), TINY, k_scale=0.04)
    written = ~np.isnan(first)
    assert written.sum() == 17 * TINY.E
    assert np.abs(first - second)[written].max() < 0.3
    assert (before != back(server.cache))[written].mean() > 0.5


@targets
def test_attention_writes_into_what_it_is_given(target):
    weights = put_all(random_weights(TINY), target)
    for options in ({}, {"output_quant": "nvfp4", "output_scale": 0.01}):
        layer = tiny(weights, **options)
        server = Server(layer, sequences(), target)
        plan = server.plan([3, 4, 5])
        hidden = put(server.next_tokens([3, 4, 5], plan), target)
        first = layer.attention(hidden, None, server.cache, plan)
        again = layer.attention(hidden, None, server.cache, plan, out=first)
        assert again is first or (again.codes is first.codes and again.scales is first.scales)
        fresh = layer.attention(hidden, None, server.cache, plan)
        pairs = [(first, fresh)] if not options else [
            (first.codes, fresh.codes), (first.scales, fresh.scales)
        ]  # fmt: skip
        for one, other in pairs:
            assert np.array_equal(back(one), back(other))
    with pytest.raises(TypeError, match="out is ndarray, expected a Quantised"):
        layer.attention(hidden, None, server.cache, plan, out=np.zeros((12, 48), np.float32))


def test_heads_are_sharded_by_default_where_weights_are():
    parallel = ContextParallel(3, block_size=2)

    def run(collective):
        spread = {"context_parallel": parallel, "collective": collective}
        whole = tiny(**spread)
        part = tiny(**spread, tp_rank=collective.rank, tp_size=3)
        return whole.cp_heads, part.cp_heads

    assert InProcess(3).run(run) == [("replicated", "sharded")] * 3


def test_deterministic_and_automatic_variants_are_passed_on():
    server = Server(tiny(deterministic=True, variants={"decode_attention": "auto"}), sequences())
    plain = Server(tiny(), sequences())
    for each in (server, plain):
        in_chunks(each)
    assert_close(server.results(), plain.results(), 1e-6)
    assert "decode_attention=auto" in repr(server.layer)


def half(dims):
    return replace(dims, qk_nope_head_dim=dims.P * 2)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rope": ROPE.cos_sin}, TypeError, "rope is ndarray, expected a Rope"),
        ({"variants": ["linear"]}, TypeError, "variants is list"),
        ({"context_parallel": 2}, TypeError, "context_parallel is int"),
        ({"collective": InProcess(1)}, TypeError, "collective is InProcess, expected one rank's"),
        ({"prefill_descales": 1.0}, ValueError, "prefill_descales needs three"),
        ({"prefill_descales": (1.0, -1.0, 1.0)}, ValueError, "k_descale is -1.0"),
        ({"decode_q_descale": 0.0}, ValueError, "decode_q_descale is 0.0"),
        ({"output_quant": "nvfp4", "output_scale": np.nan}, ValueError, "output_scale is nan"),
        ({"cache_format": "fp8_e4m3", "k_scale": 0.0}, ValueError, "k_scale is 0.0"),
        ({"cache_format": "fp8_e4m3", "k_scale": "a"}, TypeError, "k_scale is str"),
        ({"cache_format": "fp8_e4m3", "k_scale": np.ones(2, "f4")}, ValueError, "one element"),
        ({"eps": "a"}, TypeError, "eps is str"),
        ({"eps": -1.0}, ValueError, "eps is -1.0, expected a finite number of 0 or more"),
        ({"deterministic": "yes"}, TypeError, "deterministic is str"),
        ({"workspace": 3}, TypeError, "workspace is int"),
        ({"overlap_tokens": "a"}, TypeError, "overlap_tokens is str"),
    ],
)
def test_what_no_option_can_be_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        tiny(**options)


def test_weights_of_another_model_are_refused():
    weights = MLAWeights.load(random_weights(TINY, output_gate=True), TINY, output_gate=True)
    with pytest.raises(ValueError, match="output_gate is False, but weights have a g_proj"):
        MLALayer(TINY, weights, rope=ROPE)
    for other in (half(TINY), replace(TINY, rope=False)):
        with pytest.raises(ValueError, match="weights are of MLADims"):
            MLALayer(other, weights, rope=ROPE if other.rope else None, output_gate=True)


def served(block_size=4, positions=0, **plan):
    """A step of a decode and a prefill of one request each."""
    table = plan.pop("table", np.array([[0, 1], [2, 3]], np.int32))
    plan = plan_step([1, 3], [2, 1], table, block_size, None, **plan)
    cache = np.zeros((4, 4, TINY.E), np.float32)
    return np.ones((4, 56), np.float32), plan.batch.positions + positions, cache, plan


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 2}, "cache has shape .4, 4, 48., expected 2 on axis 1: the plan's block"),
        ({"parallel": ContextParallel(2, block_size=4)}, "plan is for contexts of ContextPara"),
        ({"positions": np.array([0, 0, 0, 64])}, "positions run from 1 to 67, expected 0 to 63"),
        ({"table": np.array([[0, 1], [4, 3]], np.int32)}, "plan has slot 19, but the cache has 16"),
    ],
)
def test_a_step_that_does_not_fit_changes_nothing(options, message):
    """Not even the rows of its decodes, which are written first."""
    hidden, positions, cache, plan = served(**options)
    with pytest.raises(ValueError, match=message):
        tiny()(hidden, positions, cache, plan)
    assert not cache.any()


def test_a_context_block_that_the_cache_lacks_changes_nothing():
    table = np.array([[0, 1, 2], [9, 3, 3]], np.int32)
    plan = plan_step([1, 3], [2, 4], table, 4, None)
    cache = np.zeros((4, 4, TINY.E), np.float32)
    with pytest.raises(ValueError, match="plan has block 9, but the cache has 4"):
        tiny()(np.ones((4, 56), np.float32), None, cache, plan)
    assert not cache.any()


def test_ranks_must_be_those_of_the_plan():
    parallel = ContextParallel(2, interleave=1, block_size=4)
    table = np.array([[0, 1]], np.int32)
    cache = np.zeros((4, 4, TINY.E), np.float32)
    hidden = np.ones((3, 56), np.float32)

    def run(collective):
        layer = tiny(context_parallel=parallel, collective=collective)
        other = replace(parallel, interleave=4)
        for plan, message in (
            (plan_step([3], [0], table, 4, None), "plan is for contexts of None"),
            (plan_step([3], [0], table, 4, None, parallel=other), "interleave=4"),
            (
                plan_step([3], [0], table, 4, None, parallel=parallel, rank=1 - collective.rank),
                f"plan is rank {1 - collective.rank}'s, the layer is rank {collective.rank}",
            ),
        ):
            with pytest.raises(ValueError, match=message):
                layer(hidden, None, cache, plan)
        return True

    assert all(InProcess(2).run(run))


def test_out_may_not_lie_in_the_cache():
    hidden, positions, cache, plan = served()
    wide = np.zeros((4, 4, 2 * TINY.E), np.float32)
    out = wide.reshape(16, -1)[:4, :56]
    with pytest.raises(ValueError, match="out shares memory with cache"):
        tiny()(hidden, positions, wide[..., : TINY.E], plan, out=out)
    out = np.lib.stride_tricks.as_strided(np.zeros(99, np.float32), (4, 56), (40, 4))
    with pytest.raises(ValueError, match="its elements share memory"):
        tiny()(hidden, positions, cache, plan, out=out)


def test_a_prefix_of_names():
    named = {f"model.layers.3.self_attn.{n}": w for n, w in random_weights(TINY).items()}
    layer = tiny(named, prefix="model.layers.3.self_attn")
    assert np.shares_memory(layer.weights.o_proj, named["model.layers.3.self_attn.o_proj.weight"])
