"""What a call of the layer promises: padding, outputs, what stays as it was, refusals."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from layer_models import (
    TINY,
    H,
    Server,
    assert_close,
    attention_module,
    back,
    config,
    example,
    layer_of,
    put,
    targets,
    tiny,
    torch_on_gpu,
    unchanged,
)

from sandbox.layers import InProcess, MLALayer, MLAWeights, checks, dims_of, prepare, rope_of
from sandbox.planner import ContextParallel, plan_step


@targets
@pytest.mark.parametrize("lens", [[2, 3, 1], [1, 1, 1], [1, 4, 1]])
def test_rows_beyond_the_tokens_are_zero(target, lens):
    """Whatever is in the padding, and in positions behind those of the tokens."""
    module, settings, hidden, want = example("biases, half-split rope")
    server = Server(layer_of(module, settings, target), hidden, target)
    server.step([4, 6, 3])
    plan = server.plan(lens, padded_tokens=sum(lens) + 5)
    padded = np.full((sum(lens) + 5, H), np.nan, np.float32)
    padded[: sum(lens)] = server.next_tokens(lens, plan)
    positions = plan.batch.positions.copy()
    positions[sum(lens) :] = 1 << 40
    out = put(np.full_like(padded, np.nan), target)
    given = put(padded, target)
    returned = server.layer(given, put(positions, target), server.cache, plan, out=out)
    assert returned is out
    assert not back(out)[sum(lens) :].any()
    server.keep(lens, plan, back(out))
    assert_close(server.results(), [w[:d] for w, d in zip(want, server.done)], 3e-6)


@targets
def test_without_a_plan_the_output_is_zero(target):
    module, settings, _, _ = example()
    layer = layer_of(module, settings, target)
    hidden = put(np.full((7, H), np.nan, np.float32), target)
    out = layer(hidden, None, None, None)
    assert type(out) is type(hidden)
    assert back(out).shape == (7, H)
    assert not back(out).any()


@targets
def test_a_step_without_tokens(target):
    module, settings, hidden, _ = example()
    server = Server(layer_of(module, settings, target), hidden, target)
    with unchanged(server.cache):
        server.step([0, 0, 0])
    plan = server.plan([0, 0, 0])
    out = server.layer(put(np.full((3, H), np.nan, np.float32), target), None, server.cache, plan)
    assert not back(out).any()


@targets
def test_only_the_new_tokens_rows_of_the_cache_change(target):
    module, settings, hidden, _ = example()
    server = Server(layer_of(module, settings, target), hidden, target, workspace_rows=8)
    server.step([5, 9, 3])
    before = back(server.cache).copy()
    plan = server.plan([1, 7, 0])
    new = put(server.next_tokens([1, 7, 0], plan), target)
    with unchanged(new, *map(np.asarray, (server.table,))):
        server.layer(new, None, server.cache, plan)
    rows = back(server.cache).reshape(-1, server.layer.dims.E)
    changed = np.flatnonzero(
        (rows.view(np.int32) != before.reshape(rows.shape).view(np.int32)).any(1)
    )
    assert changed.tolist() == sorted(plan.batch.slot_mapping.tolist())


def test_hidden_states_and_caches_may_be_views():
    """Columns of a wider array, every second row, pages with room between them."""
    module, settings, hidden, want = example()
    server = Server(layer_of(module, settings), hidden)
    pages = np.full((server.blocks, 7, server.layer.dims.E + 8), np.nan, np.float32)
    server.cache = pages[:, 1:5, 4:-4]
    plan = server.plan([11, 29, 7])
    wide = np.full((94, H + 6), np.nan, np.float32)
    wide[::2, 3:-3] = server.next_tokens([11, 29, 7], plan)
    out = np.full((47, H + 2), np.nan, np.float32)
    server.layer(wide[::2, 3:-3], None, server.cache, plan, out=out[:, 1:-1])
    assert np.isnan(out[:, [0, -1]]).all()
    server.keep([11, 29, 7], plan, out[:, 1:-1])
    assert_close(server.results(), want, 3e-6)
    assert np.isnan(pages[:, 0]).all()
    assert np.isnan(pages[..., :4]).all()


def test_weights_are_shared_with_the_module():
    """A change of the module's parameter is a change of the layer."""
    import torch

    settings = config()
    module, hidden = attention_module(settings), example()[2]
    layer = layer_of(module, settings)
    with torch.no_grad():
        module.o_proj.weight.mul_(2.0)
    server = Server(layer, hidden)
    server.step([11, 29, 7])
    assert_close(server.results(), [2 * w for w in example()[3]], 3e-6)


@pytest.mark.parametrize("target", [pytest.param("torch_cuda", marks=torch_on_gpu)])
def test_workspaces_are_of_torchs_allocator(target):
    """Two allocators that each hold memory the other cannot have would run out early."""
    import torch

    module, settings, hidden, _ = example()
    layer = layer_of(module, settings, target)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    Server(layer, hidden, target).step([11, 29, 7])
    assert torch.cuda.memory_allocated() - before >= layer.workspace.nbytes


def read_only(*shape):
    array = np.zeros(shape, np.float32)
    array.flags.writeable = False
    return array


def call(layer, **changes):
    table = np.array([[1, 0]], np.int32)
    arguments = {
        "hidden": np.zeros((3, 56), np.float32),
        "positions": np.arange(3),
        "cache": np.zeros((2, 4, 48), np.float32),
        "plan": plan_step([3], [0], table, 4, None),
    }
    return layer(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"hidden": np.zeros((3, 55), np.float32)}, ValueError, "hidden has shape .3, 55."),
        ({"hidden": np.zeros((3, 56), ml_dtypes.bfloat16)}, TypeError, "hidden is bfloat16"),
        ({"hidden": np.zeros((2, 56), np.float32)}, ValueError, "one row a token of the plan"),
        ({"hidden": np.zeros((3, 1, 56), np.float32)}, ValueError, "hidden has shape"),
        ({"hidden": [[0.0] * 56] * 3}, TypeError, "hidden"),
        ({"hidden": np.zeros((56, 3), np.float32).T}, ValueError, "hidden has a last axis"),
        ({"positions": np.arange(3, dtype=np.int32)}, TypeError, "positions is int32"),
        ({"positions": np.arange(2)}, ValueError, "positions has shape .2,."),
        ({"positions": np.array([0, 1, 64])}, ValueError, "positions"),
        ({"cache": np.zeros((2, 4, 47), np.float32)}, ValueError, "cache has shape"),
        ({"cache": np.zeros((2, 4, 48), np.uint8)}, TypeError, "cache is uint8"),
        ({"cache": None}, TypeError, "cache is missing"),
        ({"cache": read_only(2, 4, 48)}, ValueError, "cache: the array is read-only"),
        ({"plan": 3}, TypeError, "plan is int"),
        ({"out": np.zeros((3, 55), np.float32)}, ValueError, "out has shape"),
        ({"out": np.zeros((4, 56), np.float32)}, ValueError, "out has shape"),
        ({"out": np.zeros((3, 56), np.float16)}, TypeError, "out is float16"),
        ({"out": np.broadcast_to(np.zeros(56, np.float32), (3, 56))}, ValueError, "out"),
        ({"out": read_only(3, 56)}, ValueError, "out: the array is read-only"),
    ],
)
def test_bad_arguments_are_refused_before_anything_changes(changes, error, message):
    layer = tiny()
    cache = changes.get("cache", np.ones((2, 4, 48), np.float32))
    before = None if cache is None else cache.copy()
    with pytest.raises(error, match=message):
        call(layer, **{"cache": cache, **changes})
    assert cache is None or np.array_equal(cache, before)


def served(block_size=4, positions=0, **plan):
    """A step of a decode and a prefill of one request each."""
    table = plan.pop("table", np.array([[0, 1], [2, 3]], np.int32))
    context_lens = plan.pop("context_lens", [2, 1])
    plan = plan_step([1, 3], context_lens, table, block_size, None, **plan)
    cache = np.zeros((4, 4, TINY.E), np.float32)
    return np.ones((4, 56), np.float32), plan.batch.positions + positions, cache, plan


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 2}, "cache has shape .4, 4, 48., expected 2 on axis 1: the plan's block"),
        ({"parallel": ContextParallel(2, block_size=4)}, "plan is for contexts of ContextPara"),
        ({"positions": np.array([0, 0, 0, 64])}, "positions run from 1 to 67, expected 0 to 63"),
        ({"positions": np.array([0, -2, 0, 0])}, "positions run from -1 to 3, expected 0 to 63"),
        ({"table": np.array([[0, 1], [4, 3]], np.int32)}, "plan has slot 19, but the cache has 16"),
        (
            {"table": np.array([[9, 1], [2, 3]], np.int32), "context_lens": [4, 1]},
            "plan has block 9, but the cache has 4",
        ),
        (
            {"table": np.array([[0, 1], [8, 3]], np.int32), "context_lens": [2, 4]},
            "plan has block 8, but the cache has 4",
        ),
        (
            {"table": np.array([[-1, 1], [2, 3]], np.int32), "context_lens": [4, 1]},
            "plan has block -1, but the cache has 4",
        ),
        (
            {"table": np.array([[0, 1], [-7, 3]], np.int32), "context_lens": [2, 4]},
            "plan has block -7, but the cache has 4",
        ),
        (
            {"context_lens": [2, 17], "out_of_range": "pad"},
            "plan has a request of 5 blocks, but its block_table has 2 columns",
        ),
    ],
)
def test_a_step_that_does_not_fit_changes_nothing(options, message):
    """Not even the rows of its decodes, which are written first."""
    hidden, positions, cache, plan = served(**options)
    with pytest.raises(ValueError, match=message):
        tiny()(hidden, positions, cache, plan)
    assert not cache.any()


@pytest.mark.parametrize("bad", [9, -1])
@pytest.mark.parametrize("column", [0, 1])
def test_a_context_block_that_a_rank_lacks_changes_nothing(bad, column):
    """Rank 0 has three rows of the five of the context, in two blocks, and rank 1 two in one."""
    parallel = ContextParallel(2, interleave=1, block_size=2)
    table = np.array([[1, 2, 3]], np.int32)
    table[0, column] = bad

    def run(collective):
        layer = tiny(context_parallel=parallel, collective=collective)
        ranks = {"parallel": parallel, "rank": collective.rank}
        plan = plan_step([3], [5], table, 2, None, num_blocks=4, out_of_range="pad", **ranks)
        cache = np.zeros((4, 2, TINY.E), np.float32)
        arguments = np.ones((3, 56), np.float32), None, cache, plan
        if collective.rank == 1 and column == 1:  # padding alone
            checks.step(layer, prepare(plan), arguments[0], cache, None)
            return True
        with pytest.raises(ValueError, match=f"plan has block {bad}, but the cache has 4"):
            layer(*arguments)
        return not cache.any()

    assert all(InProcess(2).run(run))


@pytest.mark.parametrize("value", [np.nan, -1.0, 0.0, 1e-40, np.inf])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("k_scale", {"cache_format": "fp8_e4m3"}),
        ("output_scale", {"output_quant": "nvfp4"}),
        ("decode_q_descale", {}),
        ("prefill_descales", {}),
    ],
)
def test_a_scale_in_an_array_that_is_none_changes_nothing(name, options, value):
    hidden, positions, cache, plan = served()
    scale = np.ones(1, np.float32)
    layer = tiny(**options, **{name: (1.0, scale, 1.0) if name == "prefill_descales" else scale})
    cache = cache.astype(np.uint8) if name == "k_scale" else cache
    scale[0] = value
    with pytest.raises(ValueError, match=f"{name}.* is .*, expected positive, normal"):
        layer(hidden, positions, cache, plan)
    assert not cache.any()


def test_hidden_states_may_not_lie_in_the_cache():
    hidden, positions, cache, plan = served()
    hidden = cache.reshape(-1)[: hidden.size].reshape(hidden.shape)
    with pytest.raises(ValueError, match="cache shares memory with hidden"):
        tiny()(hidden, positions, cache, plan)


def test_a_cache_of_another_8_bit_float_is_refused():
    hidden, positions, cache, plan = served()
    layer = tiny(cache_format="fp8_e4m3", k_scale=0.02)
    codes = torch.from_numpy(cache.astype(np.uint8)).view(torch.float8_e5m2)
    with pytest.raises(TypeError, match="cache is float8_e5m2, but fp8_e4m3 is float8_e4m3fn"):
        layer(hidden, positions, codes, plan)
    layer(hidden, positions, codes.view(torch.float8_e4m3fn), plan)
    assert codes.view(torch.uint8).any()


def test_a_workspace_serves_one_call_at_a_time():
    """Two threads with one layer, which would write into each other's arrays."""
    hidden, positions, cache, plan = served()
    layer = tiny()
    want = layer(hidden, positions, cache, plan)

    def again(stage):
        layer(hidden, positions, cache, plan)

    layer.on_stage = again
    with pytest.raises(RuntimeError, match="the workspace is in use by another call"):
        layer(hidden, positions, cache, plan)
    layer.on_stage = None
    assert np.array_equal(layer(hidden, positions, cache, plan), want)


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


@pytest.mark.parametrize("target", [pytest.param("torch_cuda", marks=torch_on_gpu)])
def test_arrays_on_other_devices_are_refused(target):
    module, settings, hidden, _ = example()
    server = Server(layer_of(module, settings, target), hidden, target)
    plan = server.plan([3, 0, 0])
    with pytest.raises(ValueError, match="mixed devices"):
        server.layer(hidden[0][:3], None, server.cache, plan)
    with pytest.raises(ValueError, match="plan was prepared for another device"):
        server.layer(put(hidden[0][:3], target), None, server.cache, prepare(plan))


def test_what_a_variant_cannot_take_is_said():
    from sandbox.kernels import Unavailable

    layer = tiny(variants={"prefill_attention": "raw_mma"})
    with pytest.raises(Unavailable, match="prefill_attention variant 'raw_mma': takes"):
        call(layer)


def test_a_layer_of_safetensors_files(tmp_path):
    """From a checkpoint's names to a call, torch in no part of it."""
    from safetensors.torch import save_file

    settings = config()
    module, hidden = attention_module(settings), example()[2]
    tensors = {f"model.layers.3.self_attn.{n}": t for n, t in module.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    weights = MLAWeights.load(
        tmp_path / "model.safetensors", dims_of(settings), prefix="model.layers.3.self_attn"
    )
    server = Server(MLALayer(dims_of(settings), weights, rope=rope_of(settings)), hidden)
    server.step([11, 29, 7])
    assert_close(server.results(), example()[3], 3e-6)
