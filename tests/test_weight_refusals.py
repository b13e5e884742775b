"""Weights that are refused: what is said of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_weights import DIMS, FULL_RANK_Q

from sandbox.layers.weights import MLAWeights, random_weights


def error(kind, source, dims=DIMS, **options) -> str:
    with pytest.raises(kind) as caught:
        MLAWeights.load(source, dims, **options)
    return str(caught.value)


@pytest.fixture
def state() -> dict:
    return random_weights(DIMS, bias=True)


def test_all_missing_and_unknown_tensors_are_named(state):
    del state["kv_b_proj.weight"], state["o_proj.weight"], state["o_proj.bias"]
    state |= {"indexer.wq_b.weight": state["q_b_proj.weight"], "k_scale": np.ones(1)}
    model = {f"self_attn.{name}": array for name, array in state.items()}
    assert error(ValueError, model, prefix="self_attn") == (
        "weights under prefix 'self_attn.': missing self_attn.kv_b_proj.weight, "
        "self_attn.o_proj.weight; unknown self_attn.indexer.wq_b.weight, self_attn.k_scale"
    )


def test_long_lists_are_cut(state):
    state |= {f"experts.{index:02}": None for index in range(20)}
    message = error(ValueError, state)
    assert message.endswith("experts.06, experts.07 and 12 more")


@pytest.mark.parametrize("prefix", ["", "model.layers.1.attn"])
def test_a_prefix_with_no_layer_is_told_of_one_that_has(state, prefix):
    model = {f"model.layers.{i}.self_attn.{n}": a for i in (1, 2) for n, a in state.items()}
    message = error(ValueError, model, prefix=prefix)
    assert "layers are under 'model.layers.1.self_attn.' and 1 other prefixes" in message
    assert "missing" in message


def test_the_other_kind_of_q(state):
    full_rank = random_weights(FULL_RANK_Q)
    message = error(ValueError, full_rank)
    assert "missing q_a_proj.weight, q_a_layernorm.weight, q_b_proj.weight" in message
    assert "q_proj is there, but dims.q_lora_rank is 20, not None" in message
    message = error(ValueError, state, FULL_RANK_Q)
    assert "missing q_proj.weight" in message
    assert "q_a_proj is there, but dims.q_lora_rank is None" in message


def test_gates(state):
    assert "missing g_proj.weight" in error(ValueError, state, output_gate=True)
    gated = random_weights(DIMS, output_gate=True)
    assert "output_gate=True takes it" in error(ValueError, gated)
    assert "output_gate is int" in error(TypeError, gated, output_gate=1)


def test_all_misshapen_tensors_are_named(state):
    message = error(ValueError, state, replace(DIMS, qk_nope_head_dim=25))
    assert message == (
        "q_b_proj.weight has shape (192, 20), expected (198, 20): [N * (P + R), Lq]; "
        "kv_b_proj.weight has shape (240, 40), expected (246, 40): [N * (P + V), L]"
    )
    message = error(ValueError, state, replace(DIMS, q_lora_rank=21))
    assert "q_a_proj.weight has shape (20, 56), expected (21, 56): [Lq, H]" in message
    assert "q_a_proj.bias has shape (20,), expected (21,): [Lq]" in message
    state["o_proj.bias"] = state["o_proj.bias"][:, None]
    state["kv_a_proj_with_mqa.weight"] = state["kv_a_proj_with_mqa.weight"][:-1]
    assert error(ValueError, state, tp_rank=1, tp_size=2) == (
        "kv_a_proj_with_mqa.weight has shape (47, 56), expected (48, 56): [L + R, H]; "
        "o_proj.bias has shape (56, 1), expected (56,): [H]"
    )


def test_dtypes(state):
    mixed = state | {"o_proj.weight": state["o_proj.weight"].astype(np.float16)}
    assert error(TypeError, mixed) == (
        "o_proj.weight is float16, expected float32 as q_a_proj.weight"
    )
    half = random_weights(DIMS, "bfloat16", bias=True)
    message = error(TypeError, half | {"o_proj.bias": state["o_proj.bias"]})
    assert message == "o_proj.bias is float32, expected bfloat16 as q_a_proj.weight"
    norm = half["kv_a_layernorm.weight"]
    message = error(TypeError, state | {"kv_a_layernorm.weight": norm})
    assert message.startswith("kv_a_layernorm.weight is bfloat16, expected float32")
    for dtype in ("float64", "int32", ">f4"):
        double = state | {"q_b_proj.weight": state["q_b_proj.weight"].astype(dtype)}
        assert "expected float32, float16 or bfloat16" in error(TypeError, double)


def test_devices(state):
    class OnGpu:
        def __dlpack__(self, **_):
            raise AssertionError("nothing may be taken from there")

        def __dlpack_device__(self):
            return 2, 1

    assert error(ValueError, state | {"o_proj.weight": OnGpu()}) == (
        "mixed devices: q_a_proj.weight is on cpu, o_proj.weight is on cuda:1"
    )


def test_rows_that_are_not_contiguous(state):
    transposed = state["kv_b_proj.weight"].T.copy().T
    message = error(ValueError, state | {"kv_b_proj.weight": transposed})
    assert message.startswith("kv_b_proj.weight has a last axis of stride 960 bytes")
    norm = np.ones(80, np.float32)[::2]
    message = error(ValueError, state | {"kv_a_layernorm.weight": norm})
    assert message.startswith("kv_a_layernorm.weight has a last axis of stride 8 bytes")


def test_values_that_are_no_arrays(state):
    listed = state | {"o_proj.bias": [0.0] * 56}
    assert error(TypeError, listed).startswith("o_proj.bias: expected an array")
    assert "kv_b_proj.weight: expected an array" in error(
        TypeError, state | {"kv_b_proj.weight": None}
    )


@pytest.mark.parametrize("source", [None, 3, [("q_proj.weight", None)]])
def test_sources(source):
    assert f"source is {type(source).__name__}, expected a module" in error(TypeError, source)


def test_ranks_and_dims(state):
    assert error(ValueError, state, tp_size=4) == (
        "tp_size is 4, expected a divisor of the 6 heads"
    )
    assert "tp_rank is 2, expected less than tp_size, 2" in error(
        ValueError, state, tp_rank=2, tp_size=2
    )
    assert "tp_rank is -1" in error(ValueError, state, tp_rank=-1)
    assert "tp_size is 0" in error(ValueError, state, tp_size=0)
    assert "tp_size is float" in error(TypeError, state, tp_size=2.0)
    assert "dims is str, expected MLADims" in error(TypeError, state, "deepseek_v3")
    assert "prefix is int, expected a str" in error(TypeError, state, prefix=3)
