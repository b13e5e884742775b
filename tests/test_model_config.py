"""Dims and RoPE out of the configs of published models, in each form that they come in."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from sandbox.dims import PRESETS, MLADims
from sandbox.layers.model_config import NORM_EPS, dims_of, rope_of

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from transformers.models.deepseek_v2.configuration_deepseek_v2 import (  # noqa: E402
    DeepseekV2Config,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import (  # noqa: E402
    DeepseekV2Attention,
)
from transformers.models.deepseek_v3.configuration_deepseek_v3 import (  # noqa: E402
    DeepseekV3Config,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (  # noqa: E402
    DeepseekV3Attention,
    DeepseekV3RotaryEmbedding,
)
from transformers.models.kimi_linear.configuration_kimi_linear import (  # noqa: E402
    KimiLinearConfig,
)
from transformers.models.kimi_linear.modeling_kimi_linear import (  # noqa: E402
    KimiLinearAttention,
)

HEADS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
V2_YARN = {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}
# What the models' own config.json say of attention.
PUBLISHED = {
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "num_attention_heads": 128,
        "hidden_size": 7168,
        "q_lora_rank": 1536,
        **HEADS,
        "max_position_embeddings": 163840,
        "rope_theta": 10000,
        "rope_scaling": YARN,
        "rms_norm_eps": 1e-06,
    },
    "deepseek_v2_lite": {
        "model_type": "deepseek_v2",
        "num_attention_heads": 16,
        "hidden_size": 2048,
        "q_lora_rank": None,
        **HEADS,
        "max_position_embeddings": 163840,
        "rope_theta": 10000,
        "rope_scaling": V2_YARN,
    },
    "kimi_k2": {
        "model_type": "kimi_k2",
        "num_attention_heads": 64,
        "hidden_size": 7168,
        "q_lora_rank": 1536,
        **HEADS,
        "max_position_embeddings": 131072,
        "rope_theta": 50000.0,
        "rope_scaling": {**YARN, "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0},
    },
    "kimi_linear": {
        "model_type": "kimi_linear",
        "num_attention_heads": 32,
        "hidden_size": 2304,
        "q_lora_rank": None,
        **HEADS,
        "model_max_length": 1048576,
        "mla_use_nope": True,
        "rope_theta": 10000.0,
        "rope_scaling": None,
    },
}
V2 = {
    **PUBLISHED["deepseek_v2_lite"],
    "num_attention_heads": 128,
    "hidden_size": 5120,
    "q_lora_rank": 1536,
}
TINY = {
    "model_type": "deepseek_v3",
    "num_attention_heads": 3,
    "hidden_size": 56,
    "q_lora_rank": 20,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "max_position_embeddings": 50,
}


def of_transformers(config=DeepseekV3Config, **others):
    """A config object of transformers; it would write into the dicts that it is given."""
    own = {"num_key_value_heads": 3, "model_type": config.model_type}
    return config(**{**TINY, **own, **copy.deepcopy(others)})


def same(rope, other):
    return (
        np.array_equal(rope.cos_sin, other.cos_sin)
        and rope.interleaved == other.interleaved
        and rope.softmax_factor == other.softmax_factor
    )


def scale_of(config):
    return dims_of(config).softmax_scale * rope_of(config, max_positions=2).softmax_factor


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_dims(model):
    assert dims_of(PUBLISHED[model]) == PRESETS[model]


def test_dims_of_others():
    assert dims_of(V2) == MLADims(128, 5120, 512, 128, 64, 128, q_lora_rank=1536)
    assert dims_of(TINY) == PRESETS["tiny"]
    assert dims_of(SimpleNamespace(**TINY)) == PRESETS["tiny"]
    assert dims_of(of_transformers()) == PRESETS["tiny"]


def test_published_ropes():
    v3 = rope_of(PUBLISHED["deepseek_v3"])
    assert v3.cos_sin.shape == (163840, 64)
    assert v3.interleaved
    assert scale_of(PUBLISHED["deepseek_v3"]) == pytest.approx(0.1352338, abs=5e-8)
    for lite in (PUBLISHED["deepseek_v2_lite"], V2):
        rope = rope_of(lite, max_positions=9)
        assert rope.softmax_factor == pytest.approx(1.58963, abs=5e-6)
        assert np.array_equal(rope.cos_sin, v3.cos_sin[:9])
    k2 = rope_of(PUBLISHED["kimi_k2"])
    assert k2.cos_sin.shape == (131072, 64)
    assert k2.interleaved
    # The last pair turns 32 times more slowly than it would without YaRN.
    last = np.arcsin(np.float64(k2.cos_sin[1, -1]))
    assert last == pytest.approx(50000 ** (-62 / 64) / 32, rel=1e-6)
    assert rope_of(PUBLISHED["kimi_linear"]) is None


def test_all_forms_are_one(tmp_path):
    old = {**TINY, "rope_theta": 500.0, "rope_scaling": V2_YARN, "rms_norm_eps": 1e-5}
    parameters = {**V2_YARN, "rope_type": "yarn", "rope_theta": 500.0, "truncate": None}
    expected = rope_of(old, max_positions=70)
    in_object = of_transformers(rope_parameters=parameters)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").write_text(json.dumps(old))
    in_object.save_pretrained(tmp_path / "new")
    forms = {
        "rope_parameters": {**TINY, "rope_parameters": parameters},
        "type of new name": {**old, "rope_scaling": {**V2_YARN, "type": None, "rope_type": "yarn"}},
        "vLLM's": {**old, "rope_scaling": {**V2_YARN, "rope_type": "deepseek_yarn"}},
        "attributes": SimpleNamespace(**old),
        "transformers'": in_object,
        "transformers', from an old one": of_transformers(rope_theta=500.0, rope_scaling=V2_YARN),
        "file": tmp_path / "old" / "config.json",
        "folder": str(tmp_path / "old"),
        "as transformers saves": tmp_path / "new",
        "inside": {"model_type": "kimi_k25", "text_config": old},
        "objects inside": SimpleNamespace(text_config=in_object, hidden_size=3),
    }
    assert "rope_parameters" in json.loads((tmp_path / "new" / "config.json").read_text())
    assert expected.cos_sin.shape == (70, 8)
    for name, form in forms.items():
        assert dims_of(form) == PRESETS["tiny"], name
        assert same(rope_of(form, max_positions=70), expected), name
    assert (old["rope_scaling"], parameters["truncate"]) == (V2_YARN, None)  # none was written to
    changed = {**old, "rope_theta": 501.0}
    assert not same(rope_of(changed, max_positions=70), expected)


PARAMETERS = {
    "default": {"rope_type": "default", "rope_theta": 300.0},
    "linear": {"rope_type": "linear", "factor": 2.5, "rope_theta": 300.0},
    "yarn": {**YARN, "rope_type": "yarn", "rope_theta": 300.0},
    "yarn, V2": {**V2_YARN, "rope_type": "yarn", "rope_theta": 300.0, "factor": 7},
    "unlike mscales": {**YARN, "rope_type": "yarn", "mscale": 0.3, "mscale_all_dim": 0.8},
    "no mscale": {
        "rope_type": "yarn",
        "rope_theta": 300.0,
        "factor": 6.0,
        "original_max_position_embeddings": 64,
    },
    "attention_factor": {
        **V2_YARN,
        "rope_type": "yarn",
        "attention_factor": 1.5,
        "truncate": False,
    },
}


@pytest.mark.parametrize("kind", PARAMETERS)
def test_transformers_rotates_and_scales_alike(kind):
    config = of_transformers(rope_parameters=PARAMETERS[kind])
    rope = rope_of(config, max_positions=600)
    assert scale_of(config) == pytest.approx(
        DeepseekV3Attention(config, layer_idx=0).scaling, rel=1e-14
    )
    positions = torch.tensor([[1, 2, 63, 64, 365, 599]])
    cosine, sine = DeepseekV3RotaryEmbedding(config)(torch.zeros(1), positions)
    theirs = torch.cat([cosine[0, :, :4], sine[0, :, :4]], dim=-1)
    # Angles of up to 599, in float32 on their side.
    np.testing.assert_allclose(rope.cos_sin[positions[0]], theirs.numpy(), atol=1e-4)
    np.testing.assert_allclose(rope.cos_sin[1:3], theirs.numpy()[:2], atol=3e-6)
    if not kind.startswith(("default", "linear")):
        return
    assert rope.softmax_factor == 1
    assert len(rope_of(config).cos_sin) == 50


@pytest.mark.parametrize("yarn", [YARN, V2_YARN])
def test_scale_of_the_second_version(yarn):
    config = of_transformers(DeepseekV2Config, hidden_size=57, rope_scaling=yarn, rope_theta=1e4)
    assert scale_of(config) == pytest.approx(
        DeepseekV2Attention(config, layer_idx=0).scaling, rel=1e-14
    )
    assert rope_of(config, max_positions=2).interleaved


def test_one_mscale_alone():
    """As DeepSeek's code has it: the other is 1 for the table, 0 for the softmax scale."""
    tall, half = 1 + 0.1 * np.log(40), 1 + 0.05 * np.log(40)

    def first_cosine_and_factor(**mscales):
        yarn = {**YARN, "mscale": None, "mscale_all_dim": None, **mscales}
        rope = rope_of({**TINY, "rope_scaling": yarn}, max_positions=1)
        return rope.cos_sin[0, 0], rope.softmax_factor

    assert first_cosine_and_factor() == (np.float32(tall), 1)
    assert first_cosine_and_factor(mscale=0.5) == (np.float32(half), 1)
    assert first_cosine_and_factor(mscale_all_dim=0.5) == (
        np.float32(tall / half),
        pytest.approx(half**2),
    )


def test_rows_of_the_table():
    plain = {**TINY, "rope_theta": 10000.0}
    assert len(rope_of(plain).cos_sin) == 50
    assert len(rope_of(plain, max_positions=7).cos_sin) == 7
    unsaid = {name: value for name, value in plain.items() if name != "max_position_embeddings"}
    assert len(rope_of({**unsaid, "model_max_length": 6}).cos_sin) == 6
    assert len(rope_of(unsaid, max_positions=7).cos_sin) == 7
    with pytest.raises(ValueError, match="no max_position_embeddings"):
        rope_of(unsaid)
    stretched = {**unsaid, "rope_scaling": {**YARN, "original_max_position_embeddings": 16}}
    assert len(rope_of(stretched).cos_sin) == 640
    with pytest.raises(ValueError, match="max_positions is 0"):
        rope_of(plain, max_positions=0)


def test_missing_theta_is_ten_thousand():
    assert same(rope_of(TINY), rope_of({**TINY, "rope_theta": 10000}))
    assert not same(rope_of(TINY), rope_of({**TINY, "rope_theta": 9999}))
    with pytest.raises(ValueError, match="theta is 0"):
        rope_of({**TINY, "rope_theta": 0})


def test_layout_of_pairs():
    assert rope_of(TINY).interleaved
    assert rope_of({**TINY, "rope_interleave": True}).interleaved
    half_split = {**TINY, "rope_interleave": False}
    assert not rope_of(half_split).interleaved
    assert np.array_equal(rope_of(half_split).cos_sin, rope_of(TINY).cos_sin)
    assert not rope_of(of_transformers(rope_interleave=False)).interleaved
    assert rope_of({**half_split, "model_type": "another"}).interleaved is False
    unsaid = {name: value for name, value in TINY.items() if name != "model_type"}
    assert rope_of(unsaid).interleaved
    for config in (
        {**TINY, "rope_interleave": None},
        {**TINY, "model_type": "minicpm3"},
        {**TINY, "model_type": "kimi_linear", "mla_use_nope": False},
    ):
        with pytest.raises(ValueError, match="rope_interleave is None"):
            rope_of(config)


def test_models_without_positions():
    nope = {**TINY, "model_type": "kimi_linear", "mla_use_nope": True}
    for config in (
        nope,
        {**TINY, "mla_use_nope": True, "rope_theta": 10000.0},
        {**TINY, "model_type": "kimi_linear"},
        {"model_type": "kimi_k3", "text_config": nope},
        of_transformers(KimiLinearConfig),
        of_transformers(KimiLinearConfig, mla_use_nope=True, rope_theta=10000.0),
        {**TINY, "qk_rope_head_dim": 0, "mla_use_nope": True},
        {**TINY, "qk_rope_head_dim": 0},
    ):
        assert rope_of(config) is None
        assert not dims_of(config).rope
    assert dims_of(KimiLinearConfig()) == PRESETS["kimi_linear"]
    assert dims_of({**TINY, "mla_use_nope": False}).rope
    config = of_transformers(KimiLinearConfig)
    scaling = KimiLinearAttention(config, layer_idx=0).scaling
    assert dims_of(config).softmax_scale == pytest.approx(scaling, rel=1e-15)


@pytest.mark.parametrize(
    ("config", "attention"),
    [
        (DeepseekV2Config, DeepseekV2Attention),
        (DeepseekV3Config, DeepseekV3Attention),
        (KimiLinearConfig, KimiLinearAttention),
    ],
)
def test_norms_have_an_eps_of_their_own(config, attention):
    named = of_transformers(config, hidden_size=57, rope_theta=300.0, rms_norm_eps=0.125)
    layer = attention(named, layer_idx=0)
    assert layer.q_a_layernorm.variance_epsilon == NORM_EPS
    assert layer.kv_a_layernorm.variance_epsilon == NORM_EPS


def with_rope(**parameters):
    return {**TINY, "rope_parameters": parameters}


def without(config, *names):
    return {name: value for name, value in config.items() if name not in names}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        *[
            (with_rope(rope_type=kind, factor=2.0), f"type '{kind}'.* default, linear, yarn")
            for kind in ("longrope", "dynamic", "llama3", "proportional", "su")
        ],
        ({**TINY, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "type 'dynamic'"),
        ({**TINY, "rope_scaling": {"factor": 2.0}}, "type default has factor"),
        ({**TINY, "rope_scaling": "yarn"}, "rope_parameters is 'yarn'"),
        (with_rope(rope_type="linear"), "type linear has no factor"),
        (with_rope(rope_type="yarn"), "has no factor, original_max_position_embeddings"),
        (with_rope(**{**YARN, "factor": None}), "type yarn has no factor"),
        (with_rope(**YARN, short_factor=[1.0]), "type yarn has short_factor"),
        (with_rope(rope_type="linear", factor=2, mscale_all_dim=1), "linear has mscale_all_dim"),
        (with_rope(full_attention={"rope_theta": 5.0}), "default has full_attention"),
        (with_rope(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5"),
        ({**TINY, "partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25"),
        (with_rope(**{**YARN, "factor": 0.5}), "^factor is 0.5"),
        (with_rope(**{**YARN, "mscale": "1"}), "^mscale is '1'"),
        ({**TINY, "qk_rope_head_dim": 7}, "qk_rope_head_dim is 7"),
        ({**TINY, "v_head_dim": None}, "no v_head_dim"),
        (without(TINY, "kv_lora_rank"), "no kv_lora_rank"),
        (without(TINY, "q_lora_rank"), "no q_lora_rank"),
        ({"hidden_size": 4}, "config of an MLA model|no q_lora_rank"),
        (None, "no q_lora_rank"),
    ],
)
def test_refusals(config, words):
    with pytest.raises(ValueError, match=words):
        rope_of(config)


def test_whole_part_is_all():
    assert same(rope_of(with_rope(partial_rotary_factor=1.0)), rope_of(TINY))


def test_no_such_file(tmp_path):
    for path in (tmp_path, tmp_path / "absent.json", "organisation/model"):
        with pytest.raises(FileNotFoundError):
            dims_of(path)


def test_reading_needs_neither_transformers_nor_torch(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    code = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['transformers'] = sys.modules['cupy'] = None\n"
        "from sandbox.layers.model_config import dims_of, rope_of\n"
        f"assert dims_of({str(tmp_path)!r}).R == rope_of({str(tmp_path)!r}).cos_sin.shape[1] == 8\n"
    )
    root = Path(__file__).parent.parent
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=root
    )
    assert run.returncode == 0, run.stderr
