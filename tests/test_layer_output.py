"""The output of attention quantized on request, against exact references of NumPy."""

from dataclasses import replace

import numpy as np
import pytest
from layer_models import Server, assert_close, back, put, put_all, sequences, targets
from quantize_oracles import e4m3, expected_groups, expected_nvfp4, same, unpacked

from sandbox import MLADims
from sandbox.layers import MLALayer, Quantized, Rope, random_weights

DIMS = MLADims(8, 56, 40, 24, 8, 16, q_lora_rank=20)  # N * V = 128
SCALES = {"fp8_static": 0.004, "fp8_group_128": None, "fp8_group_64": None, "nvfp4": 0.003}
COSTS = {"fp8_static": 0.1, "fp8_group_128": 0.1, "fp8_group_64": 0.1, "nvfp4": 0.5}


def layer_on(target, **options):
    weights = random_weights(DIMS, "bfloat16", output_gate=True, seed=9)
    return MLALayer(
        DIMS, put_all(weights, target), rope=Rope.default(DIMS.R, 64), output_gate=True, **options
    )


def serve(target, **options):
    hidden = sequences(dtype=back(random_weights(DIMS, "bfloat16")["o_proj.weight"]).dtype)
    return Server(layer_on(target, **options), hidden, target, workspace_rows=8)


@targets
@pytest.mark.parametrize("name", SCALES)
def test_codes_are_exact(target, name):
    """Decodes, prefills over context and padding in one batch; rows of padding are zero codes."""
    outs = []
    for options in ({}, {"output_quant": name, "output_scale": SCALES[name]}):
        server = serve(target, **options)
        server.step([5, 9, 3])
        plan = server.plan([1, 8, 1], padded_tokens=13)
        new = np.full((13, 56), np.nan, server.hidden[0].dtype)
        new[:10] = server.next_tokens([1, 8, 1], plan)
        outs.append(server.layer.attention(put(new, target), None, server.cache, plan))
    plain, found = outs
    assert isinstance(found, Quantized)
    assert type(found.codes) is type(plain)
    values = back(plain)
    if name == "fp8_static":
        reciprocal = np.float32(1) / np.float32(SCALES[name])
        same(back(found.codes), e4m3(values.astype(np.float32) * reciprocal))
        assert found.scales is None
    elif name == "nvfp4":
        codes, scales = expected_nvfp4(values, SCALES[name])
        same(unpacked(back(found.codes)), codes)
        same(back(found.scales), scales)
    else:
        codes, scales = expected_groups(values, int(name.rpartition("_")[2]))
        same(back(found.codes), codes)
        same(back(found.scales), scales)
    assert not back(found.codes)[10:].any()


@targets
@pytest.mark.parametrize("name", SCALES)
def test_the_output_projection_takes_restored_codes(target, name):
    results = []
    for options in ({}, {"output_quant": name, "output_scale": SCALES[name]}):
        server = serve(target, **options)
        server.step([5, 9, 3])
        server.step([1, 8, 1])
        results.append(server.results())
    plain, coded = results
    assert_close(coded, plain, COSTS[name] * 4)
    errors = np.concatenate([abs(a - b).reshape(-1) for a, b in zip(plain, coded)])
    rms = np.sqrt(np.mean(np.concatenate(plain) ** 2))
    assert 1e-4 < np.sqrt(np.mean(errors**2)) / rms < COSTS[name]


def given(name, **options):
    """A layer that quantizes so, the arguments of a call that has a decode, and what it returns."""
    server = serve("numpy", output_quant=name, output_scale=SCALES[name], **options)
    server.step([5, 9, 3])
    plan = server.plan([1, 8, 1])
    call = {"positions": None, "cache": server.cache, "plan": plan}
    call["hidden"] = server.next_tokens([1, 8, 1], plan)
    return server.layer, call, server.layer.attention(**call)


def test_what_is_given_to_be_written_keeps_no_scale_of_another_layer():
    _, call, first = given("fp8_static")
    other = layer_on("numpy", output_quant="fp8_static", output_scale=0.02)
    again = other.attention(**call, out=first)
    assert again.codes is first.codes
    assert again.output_scale == 0.02


def wrong(out):
    """Places for `nvfp4` that no layer can write, and what it says."""
    codes, scales = out.codes, out.scales
    yield replace(out, name="fp8_static"), "out is of fp8_static, but output_quant is nvfp4"
    yield replace(out, codes=codes[:-1]), r"out.codes has shape \(9, 64\), expected \(10, 64\)"
    yield replace(out, scales=scales.view(np.int8)), "out.scales is int8, expected uint8"
    yield replace(out, scales=codes[:, : scales.shape[1]]), "shares memory with out."
    yield replace(out, codes=codes.tolist()), "out.codes: expected an array"
    frozen = codes.copy()
    frozen.flags.writeable = False
    yield replace(out, codes=frozen), "out.codes: the array is read-only"


def test_a_place_that_does_not_fit_is_refused_before_anything_changes():
    layer, call, out = given("nvfp4")
    call["hidden"] = call["hidden"] * 2
    before = call["cache"].copy()
    for place, said in wrong(out):
        with pytest.raises((TypeError, ValueError), match=said):
            layer.attention(**call, out=place)
        assert np.array_equal(call["cache"].view(np.uint16), before.view(np.uint16))
    layer.attention(**call, out=out)
    assert not np.array_equal(call["cache"].view(np.uint16), before.view(np.uint16))
