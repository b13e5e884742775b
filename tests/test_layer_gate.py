"""Output gate and NoPE, against a model of a few lines; full-rank q, and no shared key at all."""

import numpy as np
import pytest
from few_lines import mla
from layer_models import (
    SCHEDULES,
    TARGETS,
    Server,
    assert_close,
    back,
    put,
    put_all,
    sequences,
    targets,
)

from sandbox import MLADims
from sandbox.kernels import linear
from sandbox.layers import MLALayer, Rope, random_weights, run

MODELS = {
    "gate": (MLADims(3, 56, 40, 24, 8, 16, q_lora_rank=20), True),
    "nope": (MLADims(3, 56, 40, 24, 8, 16, rope=False), False),
    "nope, gate": (MLADims(3, 56, 40, 24, 8, 16, q_lora_rank=20, rope=False), True),
    "no shared key": (MLADims(3, 56, 40, 24, 0, 16, rope=False), True),
}


@targets
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.__name__)
@pytest.mark.parametrize("name", MODELS)
def test_few_lines_agree(target, name, schedule):
    dims, gate = MODELS[name]
    weights, hidden = random_weights(dims, output_gate=gate, seed=4), sequences()
    rope = Rope.default(dims.R, 64, theta=500.0) if dims.rope else None
    table = rope.cos_sin if rope else None
    want = [
        mla(weights, dims, one, scale=dims.softmax_scale, cos_sin=table, gate=gate)[0]
        for one in hidden
    ]
    layer = MLALayer(dims, put_all(weights, target), rope=rope, output_gate=gate)
    server = Server(layer, hidden, target, workspace_rows=8)
    schedule(server)
    assert_close(server.results(), want, 3e-6)


@pytest.mark.parametrize("target", TARGETS[2:])
def test_the_gate_may_run_beside_the_rest(target):
    dims, _ = MODELS["nope, gate"]
    weights = random_weights(dims, output_gate=True, seed=4)
    hidden = sequences()
    outputs = []
    for tokens in (0, 512):
        layer = MLALayer(dims, put_all(weights, target), output_gate=True, overlap_tokens=tokens)
        server = Server(layer, hidden, target)
        server.step([11, 29, 7])
        outputs.append(server.results())
    assert_close(*outputs, 1e-6)


@targets
def test_attention_before_the_output_projection_is_gated(target):
    dims, _ = MODELS["nope, gate"]
    weights = random_weights(dims, output_gate=True, seed=4)
    layer = MLALayer(dims, put_all(weights, target), output_gate=True)
    server = Server(layer, sequences(), target)
    plan = server.plan([3, 4, 5])
    hidden = put(server.next_tokens([3, 4, 5], plan), target)
    attended = layer.attention(hidden, None, server.cache, plan)
    assert type(attended) is type(hidden)
    assert attended.shape == (12, dims.N * dims.V)
    out = back(layer(hidden, None, server.cache, plan))
    want = back(attended).astype(np.float64) @ weights["o_proj.weight"].T.astype(np.float64)
    assert_close([out], [want], 3e-6)


def test_the_gate_still_reads_hidden_states_when_attention_writes():
    dims = MLADims(3, 48, 40, 24, 8, 16, rope=False)
    assert dims.N * dims.V == dims.H
    layer = MLALayer(dims, random_weights(dims, output_gate=True), output_gate=True)
    server = Server(layer, sequences(width=dims.H))
    plan = server.plan([3, 4, 5])
    hidden = server.next_tokens([3, 4, 5], plan)
    want = server.layer(hidden, None, server.cache, plan)
    with pytest.raises(ValueError, match="out shares memory with hidden"):
        layer.attention(hidden, None, server.cache, plan, out=hidden)
    layer(hidden, None, server.cache, plan, out=hidden)
    assert np.array_equal(hidden, want)


def test_the_gates_product_is_a_projection_in_stages(monkeypatch):
    dims, _ = MODELS["gate"]
    weights = random_weights(dims, output_gate=True)
    layer = MLALayer(dims, weights, rope=Rope.default(dims.R, 64), output_gate=True)
    seen = []
    layer.on_stage = seen.append

    def noting(x, weight, **others):
        if np.shares_memory(weight, layer.weights.g_proj):
            seen.append("g_proj")
        return linear(x, weight, **others)

    monkeypatch.setattr(run, "linear", noting)
    Server(layer, sequences()).step([3, 4, 5])
    at = seen.index("g_proj")
    assert seen[at - 1] == "projections"
    assert seen[at + 1] == "output gate"
