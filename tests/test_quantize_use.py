"""Quantized outputs in use: decoding, kinds of arrays, refusals, what they cost."""

import ml_dtypes
import numpy as np
import pytest
from quantize_oracles import F32, same, unpacked, values

from sandbox.arrays import bfloat16
from sandbox.dims import PRESETS, MLADims
from sandbox.kernels import quantize_groups, quantize_nvfp4, quantize_static
from sandbox.kernels.case import Workload
from sandbox.kernels.quantize import dequantize_groups, dequantize_nvfp4, dequantize_static

CALLS = {
    quantize_static: {"scale": 0.02},
    quantize_groups: {"group_size": 16},
    quantize_nvfp4: {"global_scale": 0.02},
}
every_op = pytest.mark.parametrize("op", CALLS, ids=lambda op: op.name)


def results(op, x, **more):
    found = op(x, **CALLS[op], **more)
    return found if isinstance(found, tuple) else (found,)


class TestDecoding:
    def test_static(self):
        codes = np.arange(256, dtype=np.uint8).reshape(2, 128)
        want = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * F32(0.3)
        for scale in (0.3, np.array([0.3], np.float32)):
            got = dequantize_static(codes, scale)
            assert got.dtype == np.float32
            same(got, want)

    def test_groups(self):
        codes = np.arange(144, dtype=np.uint8)[:126].reshape(3, 42)
        scales = np.arange(1, 28, dtype=np.float32).reshape(9, 3)[::3].T[:, :2]  # strided
        numbers = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        got = dequantize_groups(codes, scales)
        assert got.dtype == np.float32
        same(got, np.repeat(scales, 21, axis=1) * numbers)

    def test_nvfp4(self):
        packed = np.arange(256, dtype=np.uint8).reshape(8, 32)
        scales = np.arange(40, 72, dtype=np.uint8).reshape(8, 4)
        steps = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * F32(0.3)
        numbers = unpacked(packed).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        got = dequantize_nvfp4(packed, scales, 0.3)
        assert got.dtype == np.float32
        same(got, np.repeat(steps, 16, axis=1) * numbers)

    def test_values_come_back_as_well_as_codes_can(self):
        x = values((6, 96))
        size = np.abs(x)
        scale = F32(size.max() / 448)
        back = dequantize_static(quantize_static(x, scale), scale)
        assert (np.abs(back - x) <= size / 16 + scale * 2**-10).all()
        for form in ("float32", "ue8m0"):
            codes, scales = quantize_groups(x, group_size=24, scale_format=form)
            error = np.abs(dequantize_groups(codes, scales) - x)
            assert (error <= size / 16 + np.repeat(scales, 24, axis=1) * 2**-10).all()
            assert error.any()
        tensor_scale = F32(size.max() / (6 * 448))
        packed, scales = quantize_nvfp4(x, tensor_scale)
        steps = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * tensor_scale
        error = np.abs(dequantize_nvfp4(packed, scales, tensor_scale) - x)
        steps = np.repeat(steps, 16, axis=1)
        assert (error <= np.maximum(size / 4, steps / 4) * 1.0001)[steps > 0].all()

    def test_shapes_that_do_not_go_together(self):
        codes = np.zeros((3, 48), np.uint8)
        for scales in (np.ones((2, 3), np.float32), np.ones((3, 5), np.float32)):
            with pytest.raises(ValueError, match="scales have shape"):
                dequantize_groups(codes, scales)
        with pytest.raises(ValueError, match="scales have shape"):
            dequantize_nvfp4(codes, np.zeros((3, 7), np.uint8), 1.0)


@every_op
@pytest.mark.parametrize("variant", ["raw_element", "raw_vector", "torch"])
def test_tokens_four_gigabytes_apart(op, variant):
    chosen = op.variants[variant]
    if reason := chosen.unavailable(chosen.target(gpu=False)):
        pytest.skip(reason)
    memory = np.zeros(2**31 + 256, np.uint16).view(bfloat16)
    x = np.lib.stride_tricks.as_strided(memory, (2, 48), (2 * (2**31 + 128), 2))
    x[...] = values((2, 48), bfloat16)
    for got, want in zip(results(op, x, variant=variant), results(op, x.copy())):
        same(got, want)


@every_op
def test_torch_tensors_and_scales(op):
    torch = pytest.importorskip("torch")
    x = values((5, 48), bfloat16)
    tensor = torch.from_numpy(x.astype(np.float32)).bfloat16()
    arguments = CALLS[op]
    if op is not quantize_groups:
        (name,) = arguments
        arguments = {name: torch.nn.Parameter(torch.tensor([arguments[name]]))}
    else:
        arguments = arguments | {"scale_layout": "column", "scale_format": "ue8m0"}
    found = op(tensor, **arguments)
    more = {"scale_format": "ue8m0"} if op is quantize_groups else {}
    found = found if isinstance(found, tuple) else (found,)
    for got, want in zip(found, results(op, x, **more), strict=True):
        assert isinstance(got, torch.Tensor)
        same(got.numpy(), want)
    if op is quantize_groups:
        assert found[1].stride() == (1, 8)
        codes, scales = (each.numpy() for each in found)
        same(dequantize_groups(codes, scales), dequantize_groups(*results(op, x, **more)))


def ones(*shape, dtype=np.uint8):
    return np.ones(shape, dtype)


REFUSALS = {
    "x missing": ({"x": None}, TypeError, "x is missing"),
    "x a list": ({"x": [[1.0]]}, TypeError, "x"),
    "x float64": ({"x": ones(3, 48, dtype=np.float64)}, TypeError, "x is float64"),
    "x of codes": ({"x": ones(3, 48)}, TypeError, "x is uint8"),
    "x with heads": ({"x": ones(3, 3, 16, dtype=np.float32)}, ValueError, "x has shape"),
    "x without columns": ({"x": ones(3, 0, dtype=np.float32)}, ValueError, "W must be positive"),
    "x every other": ({"x": ones(3, 96, dtype=np.float32)[:, ::2]}, ValueError, "x has a last"),
    "out of values": ({"out": ones(3, 48, dtype=np.float32)}, TypeError, "out is float32"),
    "out too short": ({"out": ones(2, 48)}, ValueError, "out has shape"),
    "out too wide": ({"out": ones(3, 49)}, ValueError, "out has shape"),
    "out of rank 3": ({"out": ones(3, 3, 16)}, ValueError, "out has shape"),
    "out every other": ({"out": ones(3, 96)[:, ::2]}, ValueError, "out has"),
}


def refusals(op):
    scale = {quantize_static: "scale", quantize_nvfp4: "global_scale"}.get(op)
    yield from REFUSALS.items()
    if scale:
        yield "no scale", ({scale: None}, ValueError, f"{scale} is missing")
        yield "scale a word", ({scale: "one"}, TypeError, scale)
        yield "scales of tokens", ({scale: ones(3, dtype=np.float32)}, ValueError, scale)
        for wrong in (0.0, -1.0, np.inf, np.nan, 1e-40):
            yield f"scale {wrong}", ({scale: np.float32(wrong)}, ValueError, f"{scale} is")
    else:
        for wrong in (0, -8, 12, 1032):
            yield f"groups of {wrong}", ({"group_size": wrong}, ValueError, "group_size is")
        yield "groups of 8.0", ({"group_size": 8.0}, TypeError, "group_size is float")
        yield "groups that do not fit", ({"group_size": 32}, ValueError, "x has.*multiple of 32")
        yield "another format", ({"scale_format": "fp8"}, ValueError, "scale_format is 'fp8'")
        yield "another layout", ({"scale_layout": "tiled"}, ValueError, "scale_layout is")
        half = ones(3, 3, dtype=np.float16)
        yield "scales of 16 bits", ({"out_scales": half}, TypeError, "out_scales is float16")
        once = np.broadcast_to(ones(1, 3, dtype=np.float32), (3, 3))
        yield "scales in one place", ({"out_scales": once}, ValueError, "out_scales")
        back = ones(3, 3, dtype=np.float32)[::-1]
        yield "scales backwards", ({"out_scales": back}, ValueError, "out_scales has strides")
    if op is quantize_nvfp4:
        odd = ones(3, 40, dtype=np.float32)
        yield "no whole blocks", ({"x": odd}, ValueError, "x has.*multiple of 16")
        rows = ones(3, 6)[:, ::2]
        yield "scales every other", ({"out_scales": rows}, ValueError, "out_scales has a last")
    if op is not quantize_static:
        wrong = ones(3, 4, dtype=np.float32 if op is quantize_groups else np.uint8)
        yield "too many scales", ({"out_scales": wrong}, ValueError, "out_scales has shape")


@pytest.mark.parametrize(
    ("op", "changes", "error", "match"),
    [
        pytest.param(op, *refusal, id=f"{op.name}-{name}".replace(" ", "_"))
        for op in CALLS
        for name, refusal in refusals(op)
    ],
)
def test_bad_input_is_refused(op, changes, error, match):
    arguments = {"x": np.ones((3, 48), np.float32), **CALLS[op]}
    with pytest.raises(error, match=match):
        op(**{**arguments, **changes}, variant="reference")


@every_op
def test_outputs_have_memory_of_their_own(op):
    memory = np.ones(1024, np.uint8)
    x, width = memory[:576].view(np.float32).reshape(3, 48), 24 if op is quantize_nvfp4 else 48
    out = memory[572 : 572 + 3 * width].reshape(3, width)
    with pytest.raises(ValueError, match="out shares memory with x"):
        op(x, **CALLS[op], out=out)


def test_codes_and_scales_have_memory_of_their_own():
    memory, x = np.ones(144, np.uint8), np.ones((3, 48), np.float32)
    out, scales = memory.reshape(3, 48), memory[:36].view(np.float32).reshape(3, 3)
    with pytest.raises(ValueError, match="out shares memory with out_scales"):
        quantize_groups(x, group_size=16, out=out, out_scales=scales)
    with pytest.raises(ValueError, match="out shares memory with out_scales"):
        quantize_nvfp4(x, 0.1, out=out[:, :24], out_scales=out[:, 23:26])


def test_costs_are_what_a_call_moves():
    def cost(op, options):
        cases = {case.name: case for case in op.cases("compare")}
        found = op.cost(cases[f"deepseek_v3-bfloat16-8192tokens-views=False{options}"])
        assert found.bytes_read == 8192 * 16384 * 2
        return found.bytes_written / 8192

    assert cost(quantize_static, "") == 16384
    assert cost(quantize_groups, "") == 16384 + 4 * 128
    assert cost(quantize_groups, "-group=64") == 16384 + 4 * 256
    assert cost(quantize_nvfp4, "") == 8192 + 1024


@every_op
def test_workloads_are_all_new_tokens(op):
    workload = Workload("mixed", (5, 0, 7), (1, 3, 2))
    tiny = PRESETS["tiny"]
    case = op.workload_case(tiny, "tiny", bfloat16, workload, "small")
    assert op.make_inputs(case, np)["x"].shape == (6, 48)
    nobody = Workload("nobody", (), ())
    assert op.workload_case(tiny, "tiny", bfloat16, nobody, "small") is None
    odd = op.workload_case(MLADims(3, 56, 40, 24, 8, 17), "odd", bfloat16, workload, "small")
    assert (odd is None) == (op is not quantize_static)
