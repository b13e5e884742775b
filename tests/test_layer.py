"""The layer against Hugging Face's attention: whatever the steps, the same tokens come out."""

import numpy as np
import pytest
from layer_models import (
    SCHEDULES,
    Server,
    assert_close,
    at_once,
    attention_module,
    config,
    example,
    huggingface,
    in_chunks,
    layer_of,
    sequences,
    targets,
    token_by_token,
)

BOUNDS = {"float32": 3e-6, "bfloat16": 0.06}
"""Of errors over the root mean square; bfloat16 has 2**-9, and rounds a dozen times on the way."""


@targets
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.__name__)
@pytest.mark.parametrize("dtype", BOUNDS)
def test_huggingface_agrees(target, schedule, dtype):
    module, settings, hidden, want = example(dtype=dtype)
    server = Server(layer_of(module, settings, target), hidden, target, workspace_rows=8)
    schedule(server)
    assert_close(server.results(), want, BOUNDS[dtype])


@pytest.mark.parametrize("name", ["plain rope, full-rank q", "biases, half-split rope"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.__name__)
def test_other_models_agree(name, schedule):
    module, settings, hidden, want = example(name)
    server = Server(layer_of(module, settings), hidden, workspace_rows=8)
    schedule(server)
    assert_close(server.results(), want, BOUNDS["float32"])


@pytest.mark.parametrize("rows", [4, 16, 32, 4096, None])
@pytest.mark.parametrize("strategy", ["in_order", "context_first", "fewest_merges"])
def test_any_workspace_and_strategy_give_the_same(rows, strategy):
    module, settings, hidden, want = example()
    server = Server(layer_of(module, settings), hidden, workspace_rows=rows)
    server.step([6, 11, 0], strategy=strategy)
    server.step([5, 7, 4], strategy=strategy)
    server.step([0, 11, 3], strategy=strategy)
    assert_close(server.results(), want, BOUNDS["float32"])


def test_a_softmax_scale_of_the_callers_holds_across_chunks():
    """An LSE with another scale than the softmax's would weigh chunks wrongly."""
    module, settings, hidden, _ = example()
    results = []
    for rows in (4, None):
        layer = layer_of(module, settings, softmax_scale=0.3)
        server = Server(layer, hidden, workspace_rows=rows)
        in_chunks(server)
        results.append(server.results())
    assert_close(*results, 3e-6)
    whole = Server(layer_of(module, settings, softmax_scale=0.3), hidden)
    at_once(whole)
    assert_close(results[0], whole.results(), 3e-6)
    default = Server(layer_of(module, settings), hidden)
    at_once(default)
    assert np.abs(default.results()[1] - whole.results()[1]).max() > 0.01


def test_yarn_changes_scores():
    """A layer that forgets mscale or the table would pass a test at position 0."""
    module, _, hidden, want = example()
    plain = config(rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    server = Server(layer_of(module, plain), hidden)
    at_once(server)
    assert_close([server.results()[1][:1]], [want[1][:1]], 3e-6)
    assert np.abs(server.results()[1] - want[1]).max() > 0.05


def test_positions_of_the_callers_are_taken():
    """Of a shifted request only the rotations between tokens count."""
    module, settings, hidden, want = example()
    layer = layer_of(module, settings)
    server = Server(layer, hidden)
    plan = server.plan([11, 29, 7])
    positions = plan.batch.positions + 100
    out = layer(server.next_tokens([11, 29, 7], plan), positions, server.cache, plan)
    server.keep([11, 29, 7], plan, out)
    assert_close(server.results(), want, 1e-5)


def test_wide_heads_and_long_latents():
    """Dims of which none is a multiple of another, v wider than q and k."""
    settings = config(
        kv_lora_rank=33, qk_nope_head_dim=10, qk_rope_head_dim=6, v_head_dim=27, q_lora_rank=13,
        num_attention_heads=5, num_key_value_heads=5,
    )  # fmt: skip
    module, hidden = attention_module(settings), sequences((9, 14))
    want = huggingface(module, settings, hidden)
    for schedule in (at_once, token_by_token):
        server = Server(layer_of(module, settings), hidden, workspace_rows=8)
        schedule(server)
        assert_close(server.results(), want, 3e-6)
