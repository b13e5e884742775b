"""What a call of the layer promises: padding, outputs, what stays as it was, refusals."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from layer_models import (
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
    torch_on_gpu,
    unchanged,
)

from sandbox import PRESETS, MLADims
from sandbox.layers import MLALayer, MLAWeights, Rope, dims_of, prepare, random_weights, rope_of
from sandbox.planner import plan_step

TINY = PRESETS["tiny"]
ROPE = Rope.default(TINY.R, 64)


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


def tiny_layer(**options):
    return MLALayer(TINY, random_weights(TINY), **{"rope": ROPE, **options})


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
        ({"prefill_descales": (1.0, 2.0)}, ValueError, "prefill_descales needs three"),
        ({"output_quant": "fp4"}, ValueError, "output_quant is 'fp4', expected one of"),
        ({"output_quant": "fp8_static"}, ValueError, "fp8_static needs one"),
        ({"output_quant": "fp8_group_64"}, ValueError, "N . V = 48 to be a multiple of 64"),
        ({"output_scale": 2.0}, ValueError, "output_scale is given"),
        ({"cp_heads": "both"}, ValueError, "cp_heads is 'both'"),
        ({"cp_combine": "sum"}, ValueError, "cp_combine is 'sum'"),
        ({"softmax_scale": -1.0}, ValueError, "softmax_scale is -1.0"),
        ({"tp_size": 2}, ValueError, "tp_size is 2"),
    ],
)
def test_what_does_not_go_together_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        tiny_layer(**options)


def test_dims_that_rotate_nothing_take_no_rope():
    nope = replace(TINY, rope=False)
    with pytest.raises(ValueError, match="rope is given, but dims say that nothing is rotated"):
        MLALayer(nope, random_weights(nope), rope=ROPE)
    with pytest.raises(ValueError, match="qk_rope_head_dim is 7, expected an even number"):
        MLADims(3, 56, 40, 24, 7, 16)


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
        ({"plan": 3}, TypeError, "plan is int"),
        ({"out": np.zeros((3, 55), np.float32)}, ValueError, "out has shape"),
        ({"out": np.zeros((4, 56), np.float32)}, ValueError, "out has shape"),
        ({"out": np.zeros((3, 56), np.float16)}, TypeError, "out is float16"),
        ({"out": np.broadcast_to(np.zeros(56, np.float32), (3, 56))}, ValueError, "out"),
    ],
)
def test_bad_arguments_are_refused_before_anything_changes(changes, error, message):
    layer = tiny_layer()
    cache = changes.get("cache", np.ones((2, 4, 48), np.float32))
    before = None if cache is None else cache.copy()
    with pytest.raises(error, match=message):
        call(layer, **{"cache": cache, **changes})
    assert cache is None or np.array_equal(cache, before)


def test_a_read_only_cache_is_refused():
    cache = np.zeros((2, 4, 48), np.float32)
    cache.flags.writeable = False
    with pytest.raises(ValueError, match="cache: the array is read-only"):
        call(tiny_layer(), cache=cache)


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

    layer = tiny_layer(variants={"prefill_attention": "raw_mma"})
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
