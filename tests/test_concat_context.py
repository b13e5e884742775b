"""What is special to the keys of a context: exact bits, exact codes, scales, refusals."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from variants_here import here

from sandbox.arrays import bfloat16
from sandbox.cache_formats import E4M3
from sandbox.dims import PRESETS
from sandbox.kernels import concat_context, concat_context_fp8
from sandbox.kernels.case import Workload
from sandbox.kernels.conformance import bits_of

OPS = (concat_context, concat_context_fp8)
ONE = np.float32(1)


copying = pytest.mark.parametrize("variant", here(concat_context))
coding = pytest.mark.parametrize("variant", here(concat_context_fp8))
quick = pytest.mark.parametrize("variant", here(concat_context_fp8, ["cuda", "torch"]))


def parts(tokens=3, heads=3, nope=24, rope=8, value=16, dtype=bfloat16, seed=0):
    """k_nope, k_pe and v, the first and last two halves of one projection."""
    rng = np.random.default_rng(seed)
    kv = rng.standard_normal((tokens, heads, nope + value), np.float32).astype(dtype)
    row = rng.standard_normal((tokens, 40 + rope), np.float32).astype(dtype)
    return kv[..., :nope], row[:, 40:], kv[..., nope:]


def codes(values, descale):
    return E4M3.encode(values.astype(np.float32) * (ONE / np.float32(descale)))


def same_bits(left, right):
    return left.shape == right.shape and bool((bits_of(left) == bits_of(right)).all())


@copying
class TestKeys:
    @pytest.mark.parametrize("dtype", [np.float32, np.float16, bfloat16])
    def test_are_exact_copies_of_any_bits(self, variant, dtype):
        rng = np.random.default_rng(1)
        word = np.dtype(f"u{np.dtype(dtype).itemsize}")
        most = np.iinfo(word).max
        k_nope = rng.integers(0, most, (4, 3, 24), word, endpoint=True).view(dtype)
        k_pe = rng.integers(0, most, (4, 8), word, endpoint=True).view(dtype)
        k_nope[0], k_pe[1] = -np.nan, np.nan
        k_out = concat_context(k_nope, k_pe, variant=variant)
        assert k_out.shape == (4, 3, 32)
        assert same_bits(k_out[..., :24], k_nope)
        for head in range(3):
            assert same_bits(k_out[:, head, 24:], k_pe)

    @pytest.mark.parametrize("shape", [(0, 3, 24, 8), (1, 1, 1, 1), (2, 1, 7, 3), (1, 65, 8, 0)])
    def test_of_any_shape(self, variant, shape):
        k_nope, k_pe, _ = parts(*shape)
        k_out = concat_context(k_nope, k_pe if shape[3] else None, variant=variant)
        assert same_bits(k_out[..., : shape[2]], k_nope)
        assert same_bits(k_out[..., shape[2] :], np.repeat(k_pe[:, None], shape[1], axis=1))

    def test_take_a_key_with_an_axis_for_its_one_head(self, variant):
        k_nope, k_pe, _ = parts()
        expected = concat_context(k_nope, k_pe, variant=variant)
        assert same_bits(concat_context(k_nope, k_pe[:, None], variant=variant), expected)

    def test_of_heads_first_and_into_padded_rows(self, variant):
        k_nope, k_pe, _ = parts()
        expected = concat_context(k_nope, k_pe, variant=variant)
        by_head = np.ascontiguousarray(k_nope.swapaxes(0, 1)).swapaxes(0, 1)
        wide = np.full((5, 3, 48), 7, bfloat16)
        result = concat_context(by_head, k_pe, k_out=wide[..., 8:40], variant=variant)
        assert np.shares_memory(result, wide)
        assert same_bits(wide[:3, :, 8:40], expected)
        wide[:3, :, 8:40] = 7
        assert (wide == 7).all()

    def test_tokens_four_gigabytes_apart(self, variant):
        k_nope, k_pe, _ = parts(tokens=2, heads=1)
        memory = np.zeros(2**31 + 256, np.uint16).view(bfloat16)
        stride = 2 * (2**31 + 128)
        k_out = np.lib.stride_tricks.as_strided(memory, (2, 1, 32), (stride, 64, 2))
        concat_context(k_nope, k_pe, k_out=k_out, variant=variant)
        assert same_bits(k_out, concat_context(k_nope, k_pe, variant="reference"))


@coding
class TestCodes:
    @pytest.mark.parametrize("dtype", [np.float32, np.float16, bfloat16])
    def test_are_those_of_the_format(self, variant, dtype):
        k_nope, k_pe, v = parts(dtype=dtype)
        k_out, v_out = concat_context_fp8(
            k_nope, k_pe, v, k_descale=0.37, v_descale=3.7, variant=variant
        )
        assert same_bits(k_out[..., :24], codes(k_nope, 0.37))
        assert same_bits(k_out[:, 1, 24:], codes(k_pe, 0.37))
        assert same_bits(v_out, codes(v, 3.7))

    def test_saturate_and_keep_nan(self, variant):
        k_nope, k_pe, v = (np.zeros_like(x, np.float32) for x in parts())
        row = [448, 464, 465, 1e30, np.inf, -np.inf, -449, np.nan, -np.nan, 2**-10, 1.5 * 2**-9]
        want = [0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0xFE, 0x7F, 0x7F, 0x00, 0x02]
        for values in (k_nope, v):
            values[1, 2, : len(row)] = row
        k_pe[2] = row[:8]
        k_out, v_out = concat_context_fp8(
            k_nope, k_pe, v, k_descale=1, v_descale=1, variant=variant
        )
        assert k_out[1, 2, : len(row)].tolist() == want
        assert v_out[1, 2, : len(row)].tolist() == want
        assert k_out[2, 0, 24:].tolist() == want[:8]
        assert not k_out[0].any()

    def test_are_of_the_reciprocal_and_not_of_the_quotient(self, variant):
        """Ties of E4M3 times a descale, where the two ways round differently."""
        k_nope, k_pe, v = parts(tokens=1, dtype=np.float32)
        descale = np.float32(3.7)
        values = (np.arange(8, 16, dtype=np.float32) + np.float32(0.5)) / 64 * descale
        values = np.concatenate([values, np.nextafter(values, np.float32(9))])
        assert (E4M3.encode(values / descale) != codes(values, descale)).sum() >= 3
        v[0, 0] = values
        _, v_out = concat_context_fp8(
            k_nope, k_pe, v, k_descale=1, v_descale=descale, variant=variant
        )
        assert same_bits(v_out[0, 0], codes(values, descale))

    def test_scales_of_any_kind_give_the_same_bytes(self, variant):
        k_nope, k_pe, v = parts()
        kinds = [0.3, np.float64(0.3), np.float32(0.3), np.array(0.3, np.float32)]
        kinds += [np.array([0.3]), np.array([0.3], np.float32)]
        results = [
            concat_context_fp8(k_nope, k_pe, v, k_descale=kind, v_descale=kind, variant=variant)
            for kind in kinds
        ]
        for k_out, v_out in results:
            assert same_bits(k_out[..., :24], codes(k_nope, 0.3))
            assert same_bits(v_out, codes(v, 0.3))

    @pytest.mark.parametrize("shape", [(0, 3, 24, 8, 16), (1, 1, 1, 1, 1), (2, 3, 25, 0, 17)])
    def test_of_any_shape(self, variant, shape):
        k_nope, k_pe, v = parts(*shape)
        k_out, v_out = concat_context_fp8(
            k_nope, k_pe if shape[3] else None, v, k_descale=0.2, v_descale=0.1, variant=variant
        )
        assert same_bits(k_out[..., : shape[2]], codes(k_nope, 0.2))
        key = np.repeat(codes(k_pe, 0.2)[:, None], shape[1], axis=1)
        assert same_bits(k_out[..., shape[2] :], key)
        assert same_bits(v_out, codes(v, 0.1))

    def test_leave_the_rest_of_given_outputs(self, variant):
        k_nope, k_pe, v = parts()
        k_wide, v_wide = np.full((5, 3, 40), 7, np.uint8), np.full((4, 3, 24), 9, np.uint8)
        k_out, v_out = concat_context_fp8(
            k_nope, k_pe, v, k_descale=0.3, v_descale=0.1, variant=variant,
            k_out=k_wide[..., 4:36], v_out=v_wide[..., :16],
        )  # fmt: skip
        assert np.shares_memory(k_out, k_wide)
        assert same_bits(v_out[:3], codes(v, 0.1))
        k_out[:3], v_out[:3] = 7, 9
        assert (k_wide == 7).all()
        assert (v_wide == 9).all()


def test_torch_scales_and_arrays():
    torch = pytest.importorskip("torch")
    k_nope, k_pe, v = parts(dtype=np.float32)
    tensors = [torch.from_numpy(np.ascontiguousarray(x)).bfloat16() for x in (k_nope, k_pe, v)]
    for descale in (torch.tensor(0.3), torch.nn.Parameter(torch.tensor([0.3]))):
        k_out, v_out = concat_context_fp8(*tensors, k_descale=descale, v_descale=0.3)
        assert k_out.dtype == v_out.dtype == torch.uint8
        assert same_bits(k_out[..., :24].numpy(), codes(k_nope.astype(bfloat16), 0.3))


@quick
@settings(max_examples=4, deadline=None, database=None, derandomize=True)
@given(
    tokens=st.integers(0, 5),
    heads=st.sampled_from([1, 65]),
    widths=st.sampled_from([(16, 6, 20), (9, 3, 5)]),
    seed=st.integers(0, 99),
)
def test_any_number_of_tokens_and_heads(variant, tokens, heads, widths, seed):
    k_nope, k_pe, v = parts(tokens, heads, *widths, seed=seed)
    k_out, v_out = concat_context_fp8(
        k_nope, k_pe, v, k_descale=0.011, v_descale=0.3, variant=variant
    )
    assert same_bits(k_out[..., : widths[0]], codes(k_nope, 0.011))
    assert same_bits(k_out[:, heads - 1, widths[0] :], codes(k_pe, 0.011))
    assert same_bits(v_out, codes(v, 0.3))


def problem(op):
    """Three tokens, three heads, P 24, R 8, V 16, float32."""
    k_nope, k_pe, v = parts(dtype=np.float32)
    if op is concat_context:
        return {"k_nope": k_nope, "k_pe": k_pe}
    return {"k_nope": k_nope, "k_pe": k_pe, "v": v, "k_descale": 0.3, "v_descale": 0.1}


def empty(arguments):
    """Room for the keys of `problem`."""
    return np.zeros((3, 3, 32), np.uint8 if "v" in arguments else np.float32)


def _set(**values):
    return lambda a: values


def _cut(name, *index):
    return lambda a: {name: a[name][index]}


REFUSALS = {
    "k_nope missing": (_set(k_nope=None), TypeError, "k_nope is missing"),
    "k_nope float64": (lambda a: {"k_nope": a["k_nope"].astype(float)}, TypeError, "k_nope is"),
    "k_nope of rank 2": (_cut("k_nope", slice(None), 0), ValueError, "k_nope has"),
    "no heads": (_cut("k_nope", slice(None), slice(0)), ValueError, "k_nope.*N"),
    "k_nope every other": (_cut("k_nope", ..., slice(None, None, 2)), ValueError, "k_nope has"),
    "k_pe of codes": (
        lambda a: {"k_pe": a["k_pe"].astype(np.uint8)},
        TypeError,
        "k_pe is uint8.*value / k_scale.*dequantize_context",
    ),
    "k_pe of another dtype": (lambda a: {"k_pe": a["k_pe"].astype(np.float16)}, TypeError, "k_pe"),
    "k_pe too short": (_cut("k_pe", slice(2)), ValueError, "k_pe.*k_nope's tokens"),
    "k_pe too long": (lambda a: {"k_pe": np.repeat(a["k_pe"], 2, 0)}, ValueError, "k_pe"),
    "k_pe with heads": (lambda a: {"k_pe": np.stack([a["k_pe"]] * 2, 1)}, ValueError, "k_pe"),
    "k_out of another dtype": (_set(k_out=np.zeros((3, 3, 32))), TypeError, "k_out is"),
    "k_out too short": (lambda a: {"k_out": empty(a)[:2]}, ValueError, "k_out has"),
    "k_out too narrow": (lambda a: {"k_out": empty(a)[..., 1:]}, ValueError, "k_out has"),
    "k_out shares": (lambda a: {"k_out": a["k_nope"]}, ValueError, "k_out shares.*k_nope"),
}

FP8_REFUSALS = {
    "k_descale missing": (_set(k_descale=None), ValueError, "k_descale is missing"),
    "v_descale missing": (_set(v_descale=None), ValueError, "v_descale is missing"),
    "k_descale a word": (_set(k_descale="one"), TypeError, "k_descale"),
    "v_descale of heads": (_set(v_descale=np.ones(3, np.float32)), ValueError, "v_descale"),
    "k_descale zero": (_set(k_descale=0.0), ValueError, "k_descale is 0.0"),
    "k_descale negative": (_set(k_descale=-1.0), ValueError, "k_descale is -1.0"),
    "v_descale nan": (_set(v_descale=np.float32(np.nan)), ValueError, "v_descale is nan"),
    "v_descale inf": (_set(v_descale=np.inf), ValueError, "v_descale is inf"),
    "v of other heads": (_cut("v", slice(None), slice(2)), ValueError, "v has"),
    "v too short": (_cut("v", slice(2)), ValueError, "v has"),
    "v of another dtype": (lambda a: {"v": a["v"].astype(np.float16)}, TypeError, "v is"),
    "v without columns": (_cut("v", ..., slice(0)), ValueError, "v has"),
    "v_out of values": (_set(v_out=np.zeros((3, 3, 16), np.float32)), TypeError, "v_out is"),
    "v_out is k_out": (
        lambda a: dict(zip(("k_out", "v_out"), (lambda w: (w, w[..., 8:24]))(empty(a)))),
        ValueError,
        "v_out shares.*k_out",
    ),
}


@pytest.mark.parametrize(
    ("op", "change", "error", "match"),
    [
        pytest.param(op, *refusal, id=f"{op.name}-{name}".replace(" ", "_"))
        for op in OPS
        for name, refusal in (REFUSALS | (FP8_REFUSALS if op is concat_context_fp8 else {})).items()
    ],
)
def test_bad_input_is_refused(op, change, error, match):
    arguments = problem(op)
    changed = {**arguments, **change(arguments)}
    with pytest.raises(error, match=match):
        op(**changed, variant="reference")


def test_a_descale_has_to_be_named():
    with pytest.raises(TypeError, match="v_descale"):
        concat_context_fp8(*parts(), k_descale=1.0)


@pytest.mark.parametrize("op", OPS)
def test_workloads_are_the_contexts_of_prefills(op):
    dims = PRESETS["tiny"]
    decodes = Workload("decodes", (100, 7), (1, 1))
    assert op.workload_case(dims, "tiny", bfloat16, decodes, "small") is None
    fresh = Workload("fresh", (0, 7), (9, 1))
    assert op.workload_case(dims, "tiny", bfloat16, fresh, "small") is None
    mixed = Workload("mixed", (5, 7, 2), (9, 1, 3))
    case = op.workload_case(dims, "tiny", bfloat16, mixed, "small")
    assert op.make_inputs(case, np)["k_nope"].shape == (7, dims.N, dims.P)


def test_cost_counts_what_a_call_moves():
    case = next(c for c in concat_context.cases("compare") if "8192" in c.name)
    plain, fp8 = concat_context.cost(case), concat_context_fp8.cost(case)
    assert (plain.bytes_read, plain.bytes_written) == (8192 * 32896, 8192 * 49152)
    assert (fp8.bytes_read, fp8.bytes_written) == (8192 * 65664, 8192 * 40960)
