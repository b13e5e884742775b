"""An MLA layer's weights from modules and mappings: shared, divided among ranks, or refused."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from sandbox import MLADims, arrays
from sandbox.layers.weights import MLAWeights, random_weights

DIMS = MLADims(6, 56, 40, 24, 8, 16, q_lora_rank=20)
FULL_RANK_Q = replace(DIMS, q_lora_rank=None)
FIELDS = {  # field -> name in a checkpoint, the axis on which heads lie
    "q_proj": ("q_proj.weight", 0),
    "q_a_proj": ("q_a_proj.weight", None),
    "q_a_layernorm": ("q_a_layernorm.weight", None),
    "q_b_proj": ("q_b_proj.weight", 0),
    "kv_a_proj": ("kv_a_proj_with_mqa.weight", None),
    "kv_a_layernorm": ("kv_a_layernorm.weight", None),
    "kv_b_proj": ("kv_b_proj.weight", 0),
    "o_proj": ("o_proj.weight", 1),
    "g_proj": ("g_proj.weight", 0),
    "q_a_bias": ("q_a_proj.bias", None),
    "kv_a_bias": ("kv_a_proj_with_mqa.bias", None),
    "o_bias": ("o_proj.bias", None),
}
BIASES = {"q_a_bias", "kv_a_bias", "o_bias"}
LATENT_Q = {"q_a_proj", "q_a_layernorm", "q_b_proj", "q_a_bias"}


def held(weights: MLAWeights) -> dict:
    """The arrays of all fields that are not None."""
    values = {field.name: getattr(weights, field.name) for field in fields(weights)}
    return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}


def part(array, axis, rank, size):
    return array if axis is None else np.split(array, size, axis)[rank]


@pytest.fixture
def state() -> dict:
    return random_weights(DIMS, bias=True)


def hugging_face(dims: MLADims, bias: bool):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    config = DeepseekV3Config(
        hidden_size=dims.H,
        num_attention_heads=dims.N,
        num_key_value_heads=dims.N,
        q_lora_rank=dims.q_lora_rank,
        kv_lora_rank=dims.L,
        qk_nope_head_dim=dims.P,
        qk_rope_head_dim=dims.R,
        v_head_dim=dims.V,
        attention_bias=bias,
    )
    torch.manual_seed(0)
    module = DeepseekV3Attention(config, layer_idx=0)
    for parameter in module.parameters():  # norms are ones and biases zeros otherwise
        torch.nn.init.normal_(parameter)
    return module


@pytest.mark.parametrize("dims", [DIMS, FULL_RANK_Q], ids=["latent_q", "full_rank_q"])
@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
class TestHuggingFace:
    def test_every_parameter_is_shared(self, dims, bias):
        module = hugging_face(dims, bias)
        weights = MLAWeights.load(module, dims)
        absent = {"g_proj"} | (set() if bias else BIASES)
        absent |= {"q_proj"} if dims.q_lora_rank else LATENT_Q
        assert set(held(weights)) == set(FIELDS) - absent
        parameters = dict(module.named_parameters())
        for field, array in held(weights).items():
            parameter = parameters.pop(FIELDS[field][0])
            assert array.ctypes.data == parameter.data_ptr(), field
            assert array.shape == tuple(parameter.shape)
            parameter.data += 1
            assert (array == parameter.detach().numpy()).all()
        assert not parameters
        assert (weights.dims, weights.dtype) == (dims, np.float32)

    def test_absorbed_projections_and_sums_of_ranks_are_the_modules(self, dims, bias, rng):
        import torch

        module = hugging_face(dims, bias).double()
        latent, attended = rng.standard_normal((5, dims.L)), rng.standard_normal((5, 6, dims.V))
        q_nope = rng.standard_normal((5, 6, dims.P))
        with torch.no_grad():
            up = module.kv_b_proj(torch.from_numpy(latent)).view(5, 6, dims.P + dims.V).numpy()
            out = module.o_proj(torch.from_numpy(attended).flatten(1)).numpy()
        scores = np.einsum("tnp,snp->nts", q_nope, up[..., : dims.P])
        summed = np.zeros_like(out)
        single = {name: value.float() for name, value in module.state_dict().items()}
        for rank in range(3):
            weights = MLAWeights.load(single, dims, tp_rank=rank, tp_size=3)
            heads = slice(2 * rank, 2 * rank + 2)
            ql_nope = np.einsum("tnp,npl->ntl", q_nope[:, heads], weights.w_uk)
            close = {"rtol": 1e-5, "atol": 1e-5}
            np.testing.assert_allclose(ql_nope @ latent.T, scores[heads], **close)
            value = np.einsum("sl,nvl->snv", latent, weights.w_uv)
            np.testing.assert_allclose(value, up[:, heads, dims.P :], **close)
            summed += attended[:, heads].reshape(5, -1) @ weights.o_proj.T
            assert (weights.o_bias is not None) == (bias and rank == 0)
            if weights.o_bias is not None:
                summed += weights.o_bias
        np.testing.assert_allclose(summed, out, **close)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dims", [DIMS, FULL_RANK_Q], ids=["latent_q", "full_rank_q"])
def test_a_ranks_part_is_a_view(dims, size, dtype):
    state = random_weights(dims, dtype, output_gate=True, bias=True)
    for rank in range(size):
        weights = MLAWeights.load(state, dims, output_gate=True, tp_rank=rank, tp_size=size)
        assert weights.dims == replace(dims, num_heads=6 // size)
        assert (weights.tp_rank, weights.tp_size) == (rank, size)
        assert weights.dtype == arrays.DTYPES[dtype]
        expected = {field for field, (name, _) in FIELDS.items() if name in state}
        assert set(held(weights)) == expected - ({"o_bias"} if rank else set())
        for field, array in held(weights).items():
            name, axis = FIELDS[field]
            wanted = part(state[name], axis, rank, size)
            assert (array.ctypes.data, array.strides) == (wanted.ctypes.data, wanted.strides), name
            assert array.shape == wanted.shape
            assert array.tobytes() == wanted.tobytes()


def test_absorbed_projections_are_views_of_strided_rows(state):
    wide = np.full((6 * 40, 50), np.nan, np.float32)
    wide[:, :40] = state["kv_b_proj.weight"]
    state["kv_b_proj.weight"] = wide[:, :40]
    weights = MLAWeights.load(state, DIMS, tp_rank=1, tp_size=2)
    for head in range(3):
        rows = wide[(3 + head) * 40 : (4 + head) * 40, :40]
        assert (weights.w_uk[head] == rows[:24]).all()
        assert (weights.w_uv[head] == rows[24:]).all()
    assert (weights.w_uk.shape, weights.w_uv.shape) == ((3, 24, 40), (3, 16, 40))
    assert np.shares_memory(weights.w_uk, wide)
    assert np.shares_memory(weights.w_uv, wide)


@pytest.mark.parametrize("prefix", ["model.layers.3.self_attn", "model.layers.3.self_attn."])
def test_the_prefix_chooses_a_layer(state, prefix):
    model = {f"model.layers.3.self_attn.{name}": array for name, array in state.items()}
    model |= {f"model.layers.30.self_attn.{name}": array[:1] for name, array in state.items()}
    model |= {"model.layers.3.mlp.up_proj.weight": None, "lm_head.weight": np.zeros((2, 2))}
    for buffer in ("inv_freq", "cos_cached", "sin_cached"):
        model[f"model.layers.3.self_attn.rotary_emb.{buffer}"] = np.zeros(4, np.float64)
    weights = MLAWeights.load(model, DIMS, prefix=prefix)
    assert all(array.base is state[FIELDS[field][0]] for field, array in held(weights).items())


def test_bfloat16_parameters_are_shared_and_detached():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    state = {
        name: torch.nn.Parameter(torch.from_numpy(array).bfloat16())
        for name, array in random_weights(DIMS).items()
    }
    weights = MLAWeights.load(state, DIMS, tp_rank=1, tp_size=2)
    assert weights.o_proj.dtype == ml_dtypes.bfloat16
    with torch.no_grad():
        state["o_proj.weight"][3, 48] = 7  # the first column of rank 1
        state["q_b_proj.weight"][96, 2] = 9
    assert (weights.o_proj[3, 0], weights.q_b_proj[0, 2]) == (7, 9)
    weights.kv_a_layernorm[5] = 11
    assert state["kv_a_layernorm.weight"][5] == 11


def test_jax_arrays():
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    state = {name: jax.numpy.asarray(array) for name, array in random_weights(DIMS).items()}
    weights = MLAWeights.load(state, DIMS)
    for field, array in held(weights).items():
        assert array.ctypes.data == state[FIELDS[field][0]].unsafe_buffer_pointer()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_float32_norms_beside_half_precision(dtype):
    state = random_weights(DIMS, dtype)
    exact = random_weights(DIMS)
    norms = ["q_a_layernorm.weight", "kv_a_layernorm.weight"]
    weights = MLAWeights.load(state | {name: exact[name] for name in norms}, DIMS)
    assert {array.dtype for array in held(weights).values()} == {arrays.DTYPES[dtype]}
    assert weights.q_a_layernorm.tobytes() == state[norms[0]].tobytes()
    assert weights.kv_a_layernorm.tobytes() == state[norms[1]].tobytes()


def test_moving_reaches_every_array():
    state = random_weights(DIMS, output_gate=True, bias=True)
    weights = MLAWeights.load(state, DIMS, output_gate=True, tp_size=2)
    there = weights.to(SimpleNamespace(asarray=lambda array, blocking: array + 1))
    assert set(held(there)) == set(held(weights))
    assert all((held(there)[name] == array + 1).all() for name, array in held(weights).items())
    assert (there.dims, there.tp_size) == (weights.dims, 2)
    here = weights.to(np)
    assert all(held(here)[name] is array for name, array in held(weights).items())


class TestRandomWeights:
    def test_tensors_and_their_spread(self):
        dims = MLADims(16, 1000, 600, 64, 32, 48, q_lora_rank=700)
        state = random_weights(dims, "bfloat16", output_gate=True, bias=True)
        assert set(state) == {name for name, _ in FIELDS.values()} - {"q_proj.weight"}
        for name, array in state.items():
            assert array.dtype == ml_dtypes.bfloat16
            mean, spread = array.astype(float).mean(), array.astype(float).std()
            of_norm = name.endswith("layernorm.weight")
            expected = array.shape[1] ** -0.5 if array.ndim == 2 else 0.1
            assert abs(mean - of_norm) < 0.02
            assert abs(spread / expected - 1) < 0.1, name

    def test_seeds(self):
        one, again, other = (random_weights(DIMS, seed=seed) for seed in (1, 1, 2))
        for name in one:
            assert (one[name] == again[name]).all()
            assert (one[name] != other[name]).mean() > 0.9
        assert len({array.tobytes()[:16] for array in one.values()}) == len(one)
        assert not any(name.endswith(".bias") for name in one)
        assert "g_proj.weight" not in one

    def test_dtypes_that_are_none(self):
        with pytest.raises(TypeError, match="dtype is 'float64', expected one of float32"):
            random_weights(DIMS, "float64")
