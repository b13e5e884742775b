"""What is special to prefills beside packed caches and to those that make E4M3 codes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from variants_here import here

from sandbox.arrays import bfloat16
from sandbox.cache_formats import E4M3, FORMATS, Widths
from sandbox.dims import PRESETS, MLADims
from sandbox.kernels import (
    Unavailable,
    concat_insert_prefill,
    concat_insert_prefill_fp8,
    conformance,
)
from sandbox.kernels.case import Case, Workload
from sandbox.kernels.concat_insert import cases
from sandbox.kernels.conformance import bits_of

PACKED = [fmt.name for fmt in FORMATS.values() if fmt.packed]
DESCALES = ("q_descale", "k_descale", "v_descale")


to_values = pytest.mark.parametrize("variant", here(concat_insert_prefill))
to_codes = pytest.mark.parametrize("variant", here(concat_insert_prefill_fp8))
every_format = pytest.mark.parametrize("cache_format", PACKED)


def problem(op, cache_format=None, dtype=bfloat16, dims=None, tokens=(2, 1), **options):
    """A small call at positions 7, 8 and 0; outputs left out."""
    tiled = cache_format == "fp8_ds_mla"
    dims = dims or (cases.TILED if tiled else PRESETS["tiny"])
    options = {"block_size": 4, **options} | ({"format": cache_format} if cache_format else {})
    case = Case(dims, "dims", np.dtype(dtype), Workload("few", (7, 0), tokens), options, "medium")
    return case, op.make_inputs(case, np)


def call(op, arguments, variant, **options):
    try:
        return op(**arguments, variant=variant, **options)
    except Unavailable as refusal:
        pytest.skip(str(refusal))


def same_bits(left, right):
    return left.shape == right.shape and bool((bits_of(left) == bits_of(right)).all())


def codes(values, descale):
    with np.errstate(all="ignore"):
        return E4M3.encode(values.astype(np.float32) * (np.float32(1) / np.float32(descale)))


def rows_of(arguments):
    """The cache's rows of the tokens, in order."""
    cache = arguments["cache"]
    return cache.reshape(-1, cache.shape[2])[arguments["slot_mapping"]]


def key_bytes(arguments, case):
    field = case.format.fields(case.dims)["k_pe"]
    rows = rows_of(arguments)[:, field.offset : field.offset + field.nbytes]
    return np.ascontiguousarray(rows).view(field.dtype)


def unscaled(arguments):
    """The same call with scales 1, for which quotients and products are one."""
    return {
        name: np.ones(1, np.float32) if name in (*DESCALES, "k_scale") else value
        for name, value in arguments.items()
    }


@to_values
class TestPackedCache:
    @every_format
    def test_rows_are_those_of_the_format(self, variant, cache_format):
        """NoPE: the row is `CacheFormat.encode` of the inputs, byte for byte."""
        dims = cases.TILED if cache_format == "fp8_ds_mla" else cases.NOT_ROTATED
        case, arguments = problem(concat_insert_prefill, cache_format, dims=dims)
        arguments |= {"positions": None, "cos_sin": None}
        q_out, k_out = call(concat_insert_prefill, arguments, variant)
        both = np.concatenate([arguments["kv_c"][:3], arguments["k_pe"][:3]], -1)
        scale = arguments.get("k_scale", [None])[0]
        fmt = FORMATS[cache_format]
        assert same_bits(rows_of(arguments), fmt.encode(both, case.dims, k_scale=scale))
        assert same_bits(q_out, arguments["q"][:3])
        assert same_bits(k_out[:, 1, 24:], arguments["k_pe"][:3])

    def test_key_of_ds_mla_has_the_bits_of_the_heads(self, variant):
        case, arguments = problem(concat_insert_prefill, "fp8_ds_mla")
        _, k_out = call(concat_insert_prefill, arguments, variant)
        for head in range(3):
            assert same_bits(k_out[:, head, 24:], key_bytes(arguments, case))

    @pytest.mark.parametrize("cache_format", ["fp8_e4m3", "int4_per_token"])
    def test_heads_do_not_depend_on_the_cache(self, variant, cache_format):
        _, plain = problem(concat_insert_prefill)
        _, packed = problem(concat_insert_prefill, cache_format)
        packed["slot_mapping"][:] = -1
        before = packed["cache"].copy()
        heads = ("q", "k_nope", "k_pe", "kv_c", "positions", "cos_sin")
        packed |= {name: plain[name] for name in heads}
        expected = call(concat_insert_prefill, plain, variant)
        for one, other in zip(call(concat_insert_prefill, packed, variant), expected):
            assert same_bits(one, other)
        assert same_bits(packed["cache"], before)

    def test_q_in_place(self, variant):
        _, arguments = problem(concat_insert_prefill, "fp8_e4m3")
        aside = {**arguments, "cache": arguments["cache"].copy()}
        expected, _ = call(concat_insert_prefill, aside, variant)
        arguments["q_out"] = arguments["q"]
        q_out, _ = call(concat_insert_prefill, arguments, variant)
        assert q_out is arguments["q"]
        assert same_bits(q_out[:3], expected)
        assert same_bits(arguments["cache"], aside["cache"])

    def test_position_outside_the_table_gives_codes_of_nan(self, variant):
        _, arguments = problem(concat_insert_prefill, "fp8_e4m3")
        arguments["positions"][:] = [-1, 2**40, 3]
        with pytest.raises(ValueError, match="positions"):
            call(concat_insert_prefill, arguments, variant)
        call(concat_insert_prefill, arguments, variant, check_values=False)
        rows = rows_of(arguments)
        assert (rows[:2, 40:] == 0x7F).all()
        assert (rows[2, 40:] != 0x7F).any()


@to_codes
class TestCodes:
    @pytest.mark.parametrize("dtype", [np.float32, np.float16, bfloat16])
    def test_of_what_is_not_rotated_are_exact(self, variant, dtype):
        _, arguments = problem(concat_insert_prefill_fp8, dtype=dtype)
        q_out, k_out, v_out = call(concat_insert_prefill_fp8, arguments, variant)
        descales = {name: arguments[name][0] for name in DESCALES}
        assert q_out.dtype == k_out.dtype == v_out.dtype == np.uint8
        assert same_bits(q_out[..., :24], codes(arguments["q"][:3, :, :24], descales["q_descale"]))
        assert same_bits(k_out[..., :24], codes(arguments["k_nope"][:3], descales["k_descale"]))
        assert same_bits(v_out, codes(arguments["v"][:3], descales["v_descale"]))

    def test_are_alike_in_every_head_and_in_a_cache_of_the_same_scale(self, variant):
        case, arguments = problem(concat_insert_prefill_fp8, "fp8_e4m3")
        arguments["k_descale"][0] = arguments["k_scale"][0] = 0.25
        _, k_out, _ = call(concat_insert_prefill_fp8, arguments, variant)
        cached = key_bytes(arguments, case).view(np.uint8)
        for head in range(3):
            assert same_bits(k_out[:, head, 24:], cached)

    def test_cache_has_a_scale_of_its_own(self, variant):
        _, arguments = problem(concat_insert_prefill_fp8, "fp8_e5m2")
        assert arguments["k_scale"] != arguments["k_descale"]
        call(concat_insert_prefill_fp8, arguments, variant)
        latent = FORMATS["fp8_e5m2"].encode(
            arguments["kv_c"][:3], Widths(40, 0), k_scale=arguments["k_scale"][0]
        )
        assert same_bits(rows_of(arguments)[:, :40], latent)

    def test_of_rotated_columns_are_rounded_once(self, variant):
        """One angle for all: cosine 1, sine 2^-9, so that bf16 would lose what a tie turns on."""
        if variant == "raw_unfused":
            pytest.skip("rounds rotated heads to their own type first")
        _, arguments = problem(concat_insert_prefill_fp8)
        arguments["cos_sin"][:, :4], arguments["cos_sin"][:, 4:] = 1, 2**-9
        arguments["k_pe"][:, 0::2], arguments["k_pe"][:, 1::2] = 1.0625, -1
        arguments["q"][..., 24::2], arguments["q"][..., 25::2] = 1.0625, -1
        q_out, k_out, _ = call(concat_insert_prefill_fp8, unscaled(arguments), variant)
        # 1.0625 is a tie that goes to 1 (0x38); turned by 2^-9 it is above, and goes to 1.125.
        assert (k_out[..., 24::2] == 0x39).all()
        assert (q_out[..., 24::2] == 0x39).all()

    def test_saturate_and_keep_nan(self, variant):
        _, arguments = problem(concat_insert_prefill_fp8, "fp8_e4m3", np.float32)
        arguments = unscaled(arguments) | {"positions": None, "cos_sin": None}
        row = [448, 464, 465, 1e30, np.inf, -np.inf, -449, np.nan, -np.nan, 2**-10, 1.5 * 2**-9]
        want = [0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0xFE, 0x7F, 0x7F, 0x00, 0x02]
        for name in ("q", "k_nope", "v"):
            arguments[name][:, :, : len(row)] = row
        arguments["q"][..., 24:] = arguments["k_pe"][...] = row[:8]
        q_out, k_out, v_out = call(concat_insert_prefill_fp8, arguments, variant)
        for out in (q_out, k_out, v_out):
            assert (out[..., : len(row)] == np.array(want)).all()
        assert (q_out[..., 24:] == np.array(want[:8])).all()
        assert (k_out[..., 24:] == np.array(want[:8])).all()
        assert (rows_of(arguments)[:, 40:] == np.array(want[:8])).all()

    def test_are_written_for_tokens_without_a_slot(self, variant):
        _, arguments = problem(concat_insert_prefill_fp8, "int8_per_token", dims=cases.NOT_ROTATED)
        expected = call(
            concat_insert_prefill_fp8, {**arguments, "cache": arguments["cache"].copy()}, variant
        )
        arguments["slot_mapping"][:] = [-1, -(2**40), -1]
        before = arguments["cache"].copy()
        for one, other in zip(call(concat_insert_prefill_fp8, arguments, variant), expected):
            assert same_bits(one, other)
        assert same_bits(arguments["cache"], before)

    def test_position_outside_the_table_gives_codes_of_nan(self, variant):
        _, arguments = problem(concat_insert_prefill_fp8)
        arguments["positions"][:] = [-1, 2**40, 3]
        q_out, k_out, v_out = call(
            concat_insert_prefill_fp8, arguments, variant, check_values=False
        )
        for heads in (q_out, k_out):
            assert (heads[:2, :, 24:] == 0x7F).all()
            assert (heads[:, :, :24] != 0x7F).all()
            assert (heads[2] != 0x7F).all()
        assert (v_out != 0x7F).all()

    def test_scales_of_any_kind_give_the_same_bytes(self, variant):
        _, arguments = problem(concat_insert_prefill_fp8, "fp8_e5m2")
        results = []
        kinds = [0.3, np.float64(0.3), np.float32(0.3), np.array(0.3, np.float32), np.array([0.3])]
        for kind in kinds:
            given = {**arguments, "cache": arguments["cache"].copy()}
            given |= dict.fromkeys((*DESCALES, "k_scale"), kind)
            returned = call(concat_insert_prefill_fp8, given, variant)
            results.append([*returned, rows_of(given)])
        assert same_bits(results[0][2], codes(arguments["v"][:3], 0.3))
        for other in results[1:]:
            assert all(same_bits(one, two) for one, two in zip(results[0], other))

    def test_leave_the_rest_of_given_outputs(self, variant):
        _, arguments = problem(concat_insert_prefill_fp8)
        expected = call(
            concat_insert_prefill_fp8, {**arguments, "cache": arguments["cache"].copy()}, variant
        )
        wide = {
            name: np.full((5, 3, out.shape[2] + 12), 5, np.uint8)
            for name, out in zip(("q_out", "k_out", "v_out"), expected)
        }
        given = {name: array[..., 4:-8] for name, array in wide.items()}
        returned = call(concat_insert_prefill_fp8, {**arguments, **given}, variant)
        for out, want, array in zip(returned, expected, wide.values()):
            assert same_bits(out[:3], want)
            out[:3] = 5
            assert (array == 5).all()

    def test_inputs_stay_as_they_are(self, variant):
        _, arguments = problem(concat_insert_prefill_fp8, "fp8_ds_mla")
        before = {n: a.copy() for n, a in arguments.items() if isinstance(a, np.ndarray)}
        call(concat_insert_prefill_fp8, arguments, variant)
        for name in set(before) - {"cache"}:
            assert same_bits(arguments[name], before[name]), name

    def test_no_tokens(self, variant):
        _, arguments = problem(concat_insert_prefill_fp8, "fp8_e4m3", tokens=(0, 0))
        before = arguments["cache"].copy()
        outputs = call(concat_insert_prefill_fp8, arguments, variant)
        assert [out.shape for out in outputs] == [(0, 3, 32), (0, 3, 32), (0, 3, 16)]
        assert same_bits(arguments["cache"], before)

    def test_heads_of_a_transposed_product(self, variant):
        _, arguments = problem(concat_insert_prefill_fp8)
        expected = call(
            concat_insert_prefill_fp8, {**arguments, "cache": arguments["cache"].copy()}, variant
        )
        for name in ("q", "k_nope", "v"):
            by_head = np.ascontiguousarray(arguments[name].swapaxes(0, 1))
            arguments[name] = by_head.swapaxes(0, 1)
        for one, other in zip(call(concat_insert_prefill_fp8, arguments, variant), expected):
            assert same_bits(one, other)

    def test_without_rotated_columns(self, variant):
        _, arguments = problem(concat_insert_prefill_fp8, dims=cases.NO_ROPE_COLUMNS)
        q_out, k_out, _ = call(concat_insert_prefill_fp8, arguments, variant)
        assert arguments["k_pe"] is None
        assert same_bits(q_out, codes(arguments["q"][:3], arguments["q_descale"][0]))
        assert same_bits(k_out, codes(arguments["k_nope"][:3], arguments["k_descale"][0]))


WIDE_KEY = MLADims(2, 56, 40, 8, 40, 16)
"""More columns in the shared key than in the rest of a head."""


@pytest.mark.parametrize("variant", here(concat_insert_prefill_fp8, ["cuda", "torch"]))
@settings(max_examples=4, deadline=None, database=None, derandomize=True)
@given(
    tokens=st.integers(0, 9),
    dims=st.sampled_from([cases.MANY_HEADS, WIDE_KEY]),
    cache_format=st.sampled_from([None, "int8_per_token"]),
    seed=st.integers(0, 99),
)
def test_random_batches(variant, tokens, dims, cache_format, seed):
    if cache_format and dims.L % 2:
        cache_format = None
    op = concat_insert_prefill_fp8
    case, _ = problem(op, cache_format, dims=dims, tokens=(tokens, seed % 3), skipped=True)
    arguments = conformance.prepare(op, case, np)
    checked = conformance.checked_arguments(op, arguments)
    if op.variants[variant].refuses(checked):
        return
    expected = op.reference(**checked)
    op(**arguments, variant=variant)
    for name, tolerance in op.tolerance(case).items():
        _, message = conformance.distance(arguments[name], expected[name], tolerance)
        assert not message, f"{name}: {message}"


def test_fused_and_element_agree_bit_for_bit():
    op = concat_insert_prefill_fp8
    if reason := op.variants["raw_fused"].unavailable("host"):
        pytest.skip(reason)
    for cache_format in (None, "fp8_ds_mla"):
        results = []
        for variant in ("raw_element", "raw_fused"):
            _, arguments = problem(op, cache_format, skipped=True)
            results.append([*op(**arguments, variant=variant), arguments["cache"]])
        assert all(same_bits(one, two) for one, two in zip(*results))


REFUSALS = {
    "no q_descale": ({"q_descale": None}, ValueError, "q_descale is missing"),
    "no k_descale": ({"k_descale": None}, ValueError, "k_descale is missing"),
    "no v_descale": ({"v_descale": None}, ValueError, "v_descale is missing"),
    "q_descale zero": ({"q_descale": 0.0}, ValueError, "q_descale is 0.0"),
    "k_descale negative": ({"k_descale": -0.5}, ValueError, "k_descale is -0.5"),
    "v_descale nan": ({"v_descale": np.float32(np.nan)}, ValueError, "v_descale is nan"),
    "v_descale a word": ({"v_descale": "1"}, TypeError, "v_descale"),
    "q_descale of heads": ({"q_descale": np.ones(3, np.float32)}, ValueError, "q_descale"),
    "k_scale missing": ({"k_scale": None}, ValueError, "k_scale is missing"),
    "k_scale zero": ({"k_scale": 0.0}, ValueError, "k_scale is 0.0"),
    "q_out of values": ({"q_out": np.zeros((3, 3, 32), bfloat16)}, TypeError, "q_out is"),
    "v_out too short": ({"v_out": np.zeros((2, 3, 16), np.uint8)}, ValueError, "v_out has"),
    "v_out too wide": ({"v_out": np.zeros((3, 3, 32), np.uint8)}, ValueError, "v_out has"),
    "v missing": ({"v": None}, TypeError, "v is missing"),
    "v of another dtype": ({"v": np.zeros((5, 3, 16), np.float32)}, TypeError, "v is"),
    "v of other heads": ({"v": np.zeros((5, 2, 16), bfloat16)}, ValueError, "v has"),
    "v too short": ({"v": np.zeros((2, 3, 16), bfloat16)}, ValueError, "v has"),
}


@pytest.mark.parametrize(
    ("change", "error", "match"), REFUSALS.values(), ids=[n.replace(" ", "_") for n in REFUSALS]
)
def test_bad_input_is_refused_and_nothing_written(change, error, match):
    _, arguments = problem(concat_insert_prefill_fp8, "fp8_e4m3")
    before = arguments["cache"].copy()
    with pytest.raises(error, match=match):
        concat_insert_prefill_fp8(**{**arguments, **change}, variant="reference")
    assert same_bits(arguments["cache"], before)


@pytest.mark.parametrize(("name", "other"), [("q_out", "cache"), ("v_out", "k_out")])
def test_outputs_share_no_memory(name, other):
    _, arguments = problem(concat_insert_prefill_fp8, "fp8_e4m3")
    memory = np.zeros((3, 3, 48), np.uint8)
    arguments["cache"] = np.zeros((5, 4, 48), np.uint8)
    if other == "cache":
        arguments["q_out"] = arguments["cache"][:3, :3, :32]
    else:
        arguments |= {"k_out": memory[..., :32], "v_out": memory[..., 31:47]}
    with pytest.raises(ValueError, match=f"{name} shares memory with {other}"):
        concat_insert_prefill_fp8(**arguments, variant="reference")


def test_a_descale_has_to_be_named():
    _, arguments = problem(concat_insert_prefill_fp8)
    del arguments["v_descale"]
    with pytest.raises(TypeError, match="v_descale"):
        concat_insert_prefill_fp8(**arguments)


def test_torch_scales():
    torch = pytest.importorskip("torch")
    _, arguments = problem(concat_insert_prefill_fp8)
    expected = concat_insert_prefill_fp8(
        **{**arguments, "cache": arguments["cache"].copy()}, variant="reference"
    )
    scales = {name: torch.tensor(float(arguments[name][0])) for name in DESCALES}
    tensors = {
        name: torch.from_numpy(bits_of(array).view(np.int16)).view(torch.bfloat16)
        for name, array in arguments.items()
        if isinstance(array, np.ndarray) and array.dtype == bfloat16
    }
    others = {n: torch.from_numpy(arguments[n]) for n in ("slot_mapping", "positions", "cos_sin")}
    outputs = concat_insert_prefill_fp8(**{**tensors, **others, **scales}, variant="reference")
    for out, want in zip(outputs, expected):
        assert out.dtype == torch.uint8
        assert same_bits(out.numpy(), want)
