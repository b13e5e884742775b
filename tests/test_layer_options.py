"""Options of the layer that change what it computes, each seen to do so; and what does not fit."""

from dataclasses import replace

import numpy as np
import pytest
from few_lines import mla
from layer_models import (
    ROPE,
    TILED,
    TINY,
    Server,
    assert_close,
    back,
    in_chunks,
    put,
    put_all,
    rope_for,
    sequences,
    targets,
    tiny,
)

from sandbox import FORMATS, MLADims
from sandbox.kernels import OPS
from sandbox.kernels.op import Variant
from sandbox.layers import InProcess, MLALayer, MLAWeights, Rope, random_weights
from sandbox.planner import ContextParallel


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
    with pytest.raises(TypeError, match="out is ndarray, expected a Quantized"):
        layer.attention(hidden, None, server.cache, plan, out=np.zeros((12, 48), np.float32))


def test_heads_are_sharded_by_default_where_weights_are():
    parallel = ContextParallel(3, block_size=2)

    def run(collective):
        spread = {"context_parallel": parallel, "collective": collective}
        whole = tiny(**spread)
        part = tiny(**spread, tp_rank=collective.rank, tp_size=3)
        return whole.cp_heads, part.cp_heads

    assert InProcess(3).run(run) == [("replicated", "sharded")] * 3


def test_decodes_are_told_what_was_asked_and_how_long_contexts_are(monkeypatch):
    told = []
    op = OPS["decode_attention"]

    def records(**arguments):
        told.append((arguments["deterministic"], arguments["max_seq_len"]))
        op.variants["reference"].run(**arguments)

    monkeypatch.setitem(op.variants, "records", Variant(op, "records", "numpy", records))
    for deterministic in (False, True):
        variants = {"decode_attention": "records"}
        server = Server(tiny(deterministic=deterministic, variants=variants), sequences())
        server.step([4, 9, 2])
        server.step([1, 1, 1])
        server.step([1, 2, 1], decode_threshold=2)
    assert told == [(False, 10), (False, 12), (True, 10), (True, 12)]


def test_automatic_variants_may_be_asked_for():
    server = Server(tiny(variants={"decode_attention": "auto"}), sequences())
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
        ({"rope": None}, ValueError, "rope is missing: the model rotates 8 columns"),
        ({"rope": Rope.default(6, 64)}, ValueError, "rope has width 6, expected R = 8"),
        ({"cache_format": "bfloat16"}, TypeError, "plain rows are of that dtype"),
        ({"cache_format": "fp8"}, ValueError, "cache_format is 'fp8', expected one of"),
        ({"cache_format": "fp8_e4m3"}, ValueError, "k_scale is missing"),
        ({"k_scale": 2.0}, ValueError, "k_scale is given"),
        ({"cache_format": "fp8_ds_mla"}, ValueError, "fp8_ds_mla has no layout for L = 40"),
        ({"tile_scale": "raw"}, ValueError, "tile_scale is 'raw'"),
        ({"output_gate": True}, ValueError, "g_proj"),
        ({"variants": {"gater": "raw_tile"}}, ValueError, "variants names an op 'gater'"),
        ({"variants": {"gather": "fast"}}, ValueError, "variants has 'fast' for gather"),
        ({"output_quant": "fp4"}, ValueError, "output_quant is 'fp4', expected one of"),
        ({"output_quant": "fp8_static"}, ValueError, "fp8_static needs one"),
        ({"output_quant": "fp8_group_64"}, ValueError, "N . V = 48 to be a multiple of 64"),
        ({"output_scale": 2.0}, ValueError, "output_scale is given"),
        ({"cp_heads": "both"}, ValueError, "cp_heads is 'both'"),
        ({"cp_heads": ""}, ValueError, "cp_heads is ''"),
        ({"cp_combine": "sum"}, ValueError, "cp_combine is 'sum'"),
        ({"softmax_scale": -1.0}, ValueError, "softmax_scale is -1.0"),
        ({"tp_size": 2}, ValueError, "tp_size is 2"),
        ({"rope": ROPE.cos_sin}, TypeError, "rope is ndarray, expected a Rope"),
        ({"variants": ["linear"]}, TypeError, "variants is list"),
        ({"context_parallel": 2}, TypeError, "context_parallel is int"),
        (
            {"context_parallel": ContextParallel(2)},
            ValueError,
            "collective has 1 ranks, but context_parallel 2",
        ),
        ({"collective": InProcess(1)}, TypeError, "collective is InProcess, expected one rank's"),
        ({"prefill_descales": 1.0}, ValueError, "prefill_descales needs three"),
        ({"prefill_descales": (1.0, 2.0)}, ValueError, "prefill_descales needs three"),
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
def test_options_that_cannot_be_or_do_not_go_together_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        tiny(**options)


def test_dims_that_rotate_nothing_take_no_rope():
    nope = replace(TINY, rope=False)
    with pytest.raises(ValueError, match="rope is given, but dims say that nothing is rotated"):
        MLALayer(nope, random_weights(nope), rope=ROPE)
    with pytest.raises(ValueError, match="qk_rope_head_dim is 7, expected an even number"):
        MLADims(3, 56, 40, 24, 7, 16)


def test_weights_of_another_model_or_rank_are_refused():
    weights = MLAWeights.load(random_weights(TINY, output_gate=True), TINY, output_gate=True)
    with pytest.raises(ValueError, match="output_gate is False, but weights have a g_proj"):
        MLALayer(TINY, weights, rope=ROPE)
    for other in (half(TINY), replace(TINY, rope=False)):
        with pytest.raises(ValueError, match="weights are of MLADims"):
            MLALayer(other, weights, rope=ROPE if other.rope else None, output_gate=True)
    part = MLAWeights.load(random_weights(TINY), TINY, tp_rank=1, tp_size=3)
    with pytest.raises(ValueError, match="weights are those of rank 1 of 3, but tp_rank is 0"):
        tiny(part)
    tiny(part, tp_rank=1, tp_size=3)


def test_a_prefix_of_names():
    named = {f"model.layers.3.self_attn.{n}": w for n, w in random_weights(TINY).items()}
    layer = tiny(named, prefix="model.layers.3.self_attn")
    assert np.shares_memory(layer.weights.o_proj, named["model.layers.3.self_attn.o_proj.weight"])
