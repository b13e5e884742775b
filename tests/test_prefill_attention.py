"""What is special to prefill attention: identities, hostile rows, field cases, refusals."""

import numpy as np
import pytest
from attention_problems import (
    FLOAT32,
    POISON,
    SCALE,
    absorbed_and_not,
    attention,
    bounds,
    close,
    fast_prefill,
    ints,
    nothing_seen,
    numbers,
    poisoned,
    prefill,
    prefill_problem,
    same,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from sandbox.arrays import DTYPES, bfloat16
from sandbox.cache_formats import E4M3
from sandbox.kernels import decode_attention, lse_merge, lse_merge_k, prefill_attention
from sandbox.kernels.conformance import bits_of


def reference(**arguments):
    return prefill_attention(**arguments, variant="reference")


def chunked(attend, whole, context_lens, query_lens, cuts, **options):
    """The requests' attention over new tokens, then over chunks of their contexts, stacked."""
    starts = whole["cu_seqlens_k"][:-1]
    states = []
    for first, end in zip([None, *cuts], [*cuts, None]):
        rows, lens = [], []
        for start, context, new in zip(starts, context_lens, query_lens):
            if first is None:
                part = range(start + context, start + context + new)
            else:
                part = range(start + min(first, context), start + min(end or context, context))
            rows.extend(part)
            lens.append(len(part))
        chunk = whole | {"k": whole["k"][rows], "v": whole["v"][rows], "cu_seqlens_k": bounds(lens)}
        states.append(attend(**chunk, causal=first is None, **options))
    return states


class TestIdentities:
    @prefill
    def test_unabsorbed_is_absorbed(self, attend):
        projected, latent, w_uv = absorbed_and_not([3, 5], 2, attend.dtype)
        out, lse = attend(**projected)
        latents, latent_lse = decode_attention(**latent, variant="reference")
        want = np.einsum("bsnl,nlv->bsnv", latents.astype(np.float64), w_uv)
        close(out, want.reshape(out.shape), attend.dtype, 4)
        close(lse, latent_lse, attend.dtype, 4)

    @fast_prefill
    @pytest.mark.parametrize("cuts", [[0], [0, 4, 8]], ids=["1 chunk", "3 chunks"])
    @pytest.mark.parametrize("scale", [SCALE, 32**-0.5])
    @pytest.mark.parametrize(("base", "layout"), [("e", "NT"), ("2", "TN"), ("e", "TN")])
    def test_chunks_merged_are_the_whole(self, attend, cuts, scale, base, layout):
        """The third request has no context: its chunks are all empty."""
        context_lens, query_lens = [11, 6, 0], [5, 1, 4]
        whole = prefill_problem(
            query_lens, np.add(context_lens, query_lens).tolist(), attend.dtype
        ) | {"softmax_scale": scale, "lse_base": base, "lse_layout": layout}
        out, lse = attend(**whole, out_dtype="float32")
        states = chunked(attend, whole, context_lens, query_lens, cuts, out_dtype="float32")
        partials, lses = map(np.stack, zip(*states))
        conventions = {"lse_base": base, "lse_layout": layout}
        merged, merged_lse = lse_merge_k(partials, lses, **conventions)
        close(merged, out, attend.dtype)
        close(merged_lse, lse, attend.dtype)
        (left, left_lse), *others = states
        for right, right_lse in others:
            left, left_lse = lse_merge(left, left_lse, right, right_lse, **conventions)
        close(left, out, attend.dtype)
        close(left_lse, lse, attend.dtype)

    @prefill
    def test_prefix_of_three_equal_keys_and_a_suffix_of_one(self, attend):
        problem = prefill_problem([1], [4], attend.dtype, heads=1) | {"causal": False}
        problem["q"][...] = 0
        problem["v"][:3], problem["v"][3] = 0, 1
        for base, ln_4 in (("e", np.log(4)), ("2", 2.0)):
            states = [
                attend(
                    **problem | {"k": problem["k"][rows], "v": problem["v"][rows]}
                    | {"cu_seqlens_k": bounds([count]), "lse_base": base},
                )
                for rows, count in ((slice(0, 3), 3), (slice(3, 4), 1))
            ]  # fmt: skip
            out, lse = lse_merge(*states[0], *states[1], lse_base=base)
            close(out, np.full(out.shape, 0.25), attend.dtype)
            close(lse, np.full(lse.shape, ln_4), FLOAT32)

    @prefill
    def test_one_query_sees_all_keys_causal_or_not(self, attend):
        problem = prefill_problem([1, 1], [3, 1], attend.dtype)
        for causal, other in zip(attend(**problem), attend(**problem, causal=False)):
            close(causal, other, attend.dtype)

    @fast_prefill
    def test_padded_values_and_any_strides(self, attend):
        """V and the heads of q and k as columns of wider arrays whose rest is NaN."""
        problem = prefill_problem([5, 0, 9], [7, 2, 9], attend.dtype)
        out, lse = attend(**problem)
        for name, before in (("q", 8), ("k", 16), ("v", 0)):
            values = problem[name]
            wide = poisoned((*values.shape[:2], values.shape[2] + 24), attend.dtype)
            problem[name] = wide[..., before : before + values.shape[2]]
            problem[name][...] = values
        turned = poisoned((2, 14, 24), attend.dtype)
        far = poisoned((2, 28))
        given = {"out": turned.swapaxes(0, 1)[..., :16], "out_lse": far[:, ::2]}
        found = attend(**problem, **given)
        close(found[0], out, attend.dtype)
        close(found[1], lse)
        close(given["out"], out, attend.dtype)
        assert np.isnan(turned[..., 16:]).all()
        assert np.isnan(far[:, 1::2]).all()

    @fast_prefill
    def test_padded_results_through_a_merge(self, attend):
        """A view of results that are as wide as keys, the rest NaN, as the merge gets it."""
        whole = prefill_problem([4, 3], [14, 3], attend.dtype)
        expected, expected_lse = attend(**whole)
        states = chunked(attend, whole, [10, 0], [4, 3], [0, 6])
        padded = []
        for out, lse in states:
            wide = poisoned((*out.shape[:2], 24), out.dtype)
            wide[..., :16] = out
            padded.append((wide[..., :16], lse))
        (left, left_lse), *others = padded
        for right, right_lse in others:
            left, left_lse = lse_merge(left, left_lse, right, right_lse)
        close(left, expected, attend.dtype)
        close(left_lse, expected_lse)

    @prefill
    def test_layout_is_what_the_caller_says_where_no_shape_tells(self, attend):
        problem = prefill_problem([4], [4], attend.dtype, heads=4)
        out, lse = attend(**problem)
        by_token, by_token_lse = attend(**problem, lse_layout="TN")
        same(by_token, out)
        same(by_token_lse, lse.T.copy())
        assert np.abs(lse - lse.T).max() > 0.1
        close(lse, reference(**problem)[1])

    @prefill
    def test_base_2_is_base_e_in_other_units(self, attend):
        problem = prefill_problem([2, 1], [2, 3], attend.dtype)
        out, lse = attend(**problem)
        other, other_lse = attend(**problem, lse_base="2")
        same(other, out)
        close(other_lse, lse / np.log(2))

    @fast_prefill
    def test_without_lse_the_results_are_the_same(self, attend):
        problem = prefill_problem([3, 70], [5, 70], attend.dtype)
        same(attend(**problem, return_lse=False), attend(**problem)[0])


class TestRows:
    @prefill
    def test_rows_of_nobody_never_matter(self, attend):
        problem = prefill_problem([2, 1], [3, 1], attend.dtype)
        out, lse = attend(**problem)
        for name, before, after in (("q", 0, 3), ("k", 2, 1), ("v", 2, 1)):
            rows = [poisoned((n, *problem[name].shape[1:]), attend.dtype) for n in (before, after)]
            problem[name] = np.concatenate([rows[0], problem[name], rows[1]])
        problem["cu_seqlens_k"] = problem["cu_seqlens_k"] + np.int32(2)
        wide, wide_lse = attend(**problem)
        same(wide[:3], out)
        same(wide_lse[:, :3].copy(), lse)
        nothing_seen(wide[3:], wide_lse[:, 3:])

    @prefill
    def test_queries_before_the_first_key(self, attend):
        """More queries than keys: the first ones see nothing."""
        problem = prefill_problem([5, 3], [2, 0], attend.dtype)
        out, lse = attend(**problem)
        nothing_seen(out[[0, 1, 2, 5, 6, 7]], lse[:, [0, 1, 2, 5, 6, 7]])
        scores = SCALE * np.einsum(
            "qnd,knd->nqk", problem["q"][3:5].astype(np.float64), problem["k"].astype(np.float64)
        )
        for head in range(2):
            values = problem["v"][:, head].astype(np.float64)
            first, first_lse = attention(scores[head, :1, :1], values[:1])
            second, second_lse = attention(scores[head, 1:], values)
            close(out[3:5, head], np.concatenate([first, second]), attend.dtype)
            close(lse[head, 3:5], np.concatenate([first_lse, second_lse]))

    @prefill
    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize(
        ("query_lens", "key_lens"),
        [([], []), ([0], [0]), ([0, 0], [3, 0]), ([2], [0]), ([0, 1, 0], [0, 0, 2])],
        ids=str,
    )
    def test_nothing_to_see(self, attend, causal, query_lens, key_lens):
        problem = prefill_problem(query_lens, key_lens, attend.dtype, seed=1)
        out, lse = attend(**problem, causal=causal)
        assert out.shape == (sum(query_lens), 2, 16)
        assert lse.shape == (2, sum(query_lens))
        nothing_seen(out, lse)

    @fast_prefill
    @pytest.mark.parametrize("causal", [True, False])
    def test_lengths_around_every_tile(self, attend, causal):
        lens = [1, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129]
        problem = prefill_problem(lens, lens[::-1], attend.dtype, heads=1, seed=2)
        found, want = (each(**problem, causal=causal) for each in (attend, reference))
        close(found[0], want[0], attend.dtype)
        close(found[1], want[1])

    @fast_prefill
    def test_long_beside_short(self, attend):
        problem = prefill_problem([1, 257, 64, 63], [1, 257, 300, 63], attend.dtype, seed=3)
        for got, want in zip(attend(**problem), reference(**problem)):
            close(got, want, attend.dtype)

    @fast_prefill
    @pytest.mark.parametrize("heads", [1, 3, 9, 63, 64, 65, 126])
    def test_any_number_of_heads(self, attend, heads):
        problem = prefill_problem([3, 2], [5, 2], attend.dtype, heads=heads, seed=heads)
        for got, want in zip(attend(**problem), reference(**problem)):
            close(got, want, attend.dtype)

    @fast_prefill
    @pytest.mark.parametrize("name", ["q", "k", "v"])
    def test_nan_stays_in_its_request(self, attend, name):
        problem = prefill_problem([40, 33, 20], [40, 50, 70], attend.dtype)
        out, lse = attend(**problem)
        kind = "cu_seqlens_q" if name == "q" else "cu_seqlens_k"
        first, end = problem[kind][1:3]
        problem[name][(first + end) // 2] = np.nan
        hurt, hurt_lse = attend(**problem)
        others = np.r_[0:40, 73:93]
        same(hurt[others], out[others])
        same(hurt_lse[:, others], lse[:, others])
        assert np.isnan(hurt[40:73]).any()

    @fast_prefill
    def test_nan_query_harms_no_other(self, attend):
        problem = prefill_problem([70], [70], attend.dtype)
        out, lse = attend(**problem)
        problem["q"][21, 1] = np.nan
        hurt, hurt_lse = attend(**problem)
        assert np.isnan(hurt[21, 1]).all()
        assert np.isnan(hurt_lse[1, 21])
        hurt[21, 1], hurt_lse[1, 21] = out[21, 1], lse[1, 21]
        same(hurt, out)
        same(hurt_lse, lse)


class TestScores:
    @prefill
    def test_equal_keys(self, attend):
        """The LSE of `n` equal scores `s` is `log(n) + s`, the result the mean of the values."""
        problem = prefill_problem([2], [4], attend.dtype, heads=1)
        problem["k"][...] = problem["k"][:1]
        out, lse = attend(**problem)
        score = SCALE * (
            problem["q"][:, 0].astype(np.float64) @ problem["k"][0, 0].astype(np.float64)
        )
        close(lse[0], score + np.log([3, 4]))
        values = problem["v"][:, 0].astype(np.float64)
        close(out[:, 0], [values[:3].mean(0), values.mean(0)], attend.dtype)

    @fast_prefill
    @pytest.mark.parametrize("sign", [1, -1])
    @pytest.mark.parametrize("rising", [True, False])
    def test_huge_scores_are_finite(self, attend, sign, rising):
        """Scores from 0 to 10000, or -10000, larger or smaller from tile to tile."""
        problem = prefill_problem([1], [201], attend.dtype, heads=1) | {"softmax_scale": 1.0}
        problem["q"][...] = problem["k"][...] = 0
        problem["q"][..., 0] = 50 * sign
        steps = np.arange(201) if rising else np.arange(201)[::-1]
        problem["k"][:, 0, 0] = steps
        out, lse = attend(**problem)
        top = int(np.argmax(sign * steps))
        close(out[0, 0], problem["v"][top, 0], attend.dtype)
        close(lse, np.full((1, 1), 10000.0 if sign > 0 else 0.0))

    @fast_prefill
    def test_far_below_zero_is_not_nothing(self, attend):
        problem = prefill_problem([1], [130], attend.dtype, heads=1) | {"softmax_scale": 1.0}
        problem["q"][...] = problem["k"][...] = 0
        problem["q"][..., 0], problem["k"][..., 0] = -100, 100
        out, lse = attend(**problem)
        close(out[0, 0], problem["v"][:, 0].astype(np.float64).mean(axis=0), attend.dtype)
        close(lse, np.full((1, 1), np.log(130) - 10000))


def in_codes(problem, descales):
    return problem | {
        name: E4M3.quantise(problem[name], np.float32(descale))
        for name, descale in zip("qkv", descales)
    }


class TestScalars:
    @prefill
    def test_softmax_scale_of_any_kind(self, attend):
        problem = prefill_problem([2], [3], attend.dtype, heads=1)
        out, lse = attend(**problem)
        for kind in (np.float64, np.float32):
            other, other_lse = attend(**problem | {"softmax_scale": kind(SCALE)})
            same(other, out)
            same(other_lse, lse)

    @fast_prefill
    def test_descales_of_any_kind(self, attend):
        torch = pytest.importorskip("torch")
        problem = in_codes(prefill_problem([3], [5]), (0.5, 0.25, 2.0))
        kinds = (
            float,
            np.float64,
            lambda x: np.array([x], np.float32),
            *([] if attend.target == "gpu" else [lambda x: torch.tensor(x)]),
        )
        found = [
            attend(
                **problem, q_descale=kind(0.5), k_descale=kind(0.25), v_descale=kind(2.0),
                out_dtype="float32",
            )
            for kind in kinds
        ]  # fmt: skip
        for out, lse in found[1:]:
            same(out, found[0][0])
            same(lse, found[0][1])

    @fast_prefill
    def test_codes_are_the_values_they_stand_for(self, attend):
        """Each descale where it belongs: scores have those of q and k, results that of v."""
        descales = (0.125, 0.5, 4.0)
        problem = in_codes(prefill_problem([3, 20], [5, 40]), descales)
        values = problem | {
            name: E4M3.decode(problem[name]).astype(np.float32) * np.float32(descale)
            for name, descale in zip("qkv", descales)
        }
        want, want_lse = reference(**values)
        named = {f"{name}_descale": descale for name, descale in zip("qkv", descales)}
        out, lse = attend(**problem, **named, out_dtype="float32")
        close(out, want, bfloat16, 2)
        close(lse, want_lse)
        assert attend(**problem, **named, return_lse=False).dtype == bfloat16


@prefill
def test_offsets_of_more_than_32_bits(attend):
    """Two tokens 2^31 + 8 elements apart, in memory of which only the touched pages exist."""
    problem = prefill_problem([2], [2], attend.dtype, heads=1)
    expected, expected_lse = attend(**problem)
    item, stride = attend.dtype.itemsize, 2**31 + 8
    try:
        memory = np.empty(stride + 256, attend.dtype)
        far = {}
        for place, (name, width) in enumerate((("q", 32), ("k", 32), ("v", 16), ("out", 16))):
            offset, strides = 64 * place * item, (stride * item, width * item, item)
            far[name] = np.ndarray((2, 1, width), attend.dtype, memory, offset, strides)
            if name != "out":
                far[name][...] = problem[name]
        _, lse = attend(**problem | far)
    except MemoryError as failure:
        pytest.skip(f"no room for the views: {failure}")
    same(far["out"].copy(), expected)
    same(lse, expected_lse)


@fast_prefill
@settings(max_examples=12, deadline=None, database=None, derandomize=True)
@given(
    lens=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 80)), max_size=4),
    heads=st.integers(1, 4),
    causal=st.booleans(),
    seed=st.integers(0, 99),
)
def test_random_batches(attend, lens, heads, causal, seed):
    query_lens, key_lens = ([pair[i] for pair in lens] for i in range(2))
    problem = prefill_problem(query_lens, key_lens, attend.dtype, heads=heads, seed=seed)
    found, want = (each(**problem, causal=causal) for each in (attend, reference))
    close(found[0], want[0], attend.dtype)
    close(found[1], want[1])


GOOD = prefill_problem([2, 3], [4, 3])
CODES = {**in_codes(GOOD, (1, 1, 1)), "q_descale": 1.0, "k_descale": 1.0, "v_descale": 1.0}
CODES["out_dtype"] = "float32"
ROOM = np.full(1000, POISON, np.float32)


def changed(name, change):
    return {name: change(GOOD[name])}


def shifted(start, shape):
    return ROOM[start : start + int(np.prod(shape))].reshape(shape)


@pytest.mark.parametrize(
    ("change", "error", "names"),
    [
        ({"q": None}, TypeError, "q is missing"),
        ({"q": [[[1.0]]]}, TypeError, "q"),
        (changed("q", lambda q: q[0]), ValueError, "q has shape"),
        (changed("q", lambda q: q.astype(np.float64)), TypeError, "q is float64"),
        (changed("q", lambda q: q.astype(np.float16)), TypeError, "k is float32"),
        (changed("q", lambda q: q.swapaxes(1, 2)), ValueError, "q has a last axis"),
        (changed("q", lambda q: q[::-1]), ValueError, "q has strides"),
        (changed("q", lambda q: q[..., :0]), ValueError, "q has shape"),
        (changed("q", lambda q: q[:, :0]), ValueError, "q has shape"),
        (changed("q", lambda q: q[..., :16]), ValueError, "k has shape"),
        (changed("k", lambda k: k[:, :1]), ValueError, "k has shape"),
        (changed("k", lambda k: k[:6]), ValueError, "v has shape"),
        (changed("v", lambda v: v[:, :1]), ValueError, "v has shape"),
        (changed("v", lambda v: v[..., ::2]), ValueError, "v has a last axis"),
        (changed("v", lambda v: v[..., :0]), ValueError, "v has shape"),
        (changed("v", lambda v: v.astype(bfloat16)), TypeError, "v is bfloat16"),
        ({"cu_seqlens_q": bounds([2, 3]).astype(np.int64)}, TypeError, "cu_seqlens_q is int64"),
        ({"cu_seqlens_q": bounds([2, 3])[None]}, ValueError, "cu_seqlens_q has shape"),
        ({"cu_seqlens_q": ints()}, ValueError, "cu_seqlens_q is empty"),
        ({"cu_seqlens_q": ints(0, 0, 2, 0, 5)[::2]}, ValueError, "cu_seqlens_q has a last axis"),
        ({"cu_seqlens_q": ints(0, 5, 3)}, ValueError, "cu_seqlens_q must not decrease"),
        ({"cu_seqlens_q": ints(1, 2, 5)}, ValueError, "cu_seqlens_q starts at 1"),
        ({"cu_seqlens_q": ints(-1, 2, 5)}, ValueError, "cu_seqlens_q must not"),
        ({"cu_seqlens_q": ints(0, 2, 6)}, ValueError, "cu_seqlens_q ends at 6"),
        ({"cu_seqlens_q": None}, TypeError, "cu_seqlens_q is missing"),
        ({"cu_seqlens_k": ints(0, 7)}, ValueError, "cu_seqlens_k has shape"),
        ({"cu_seqlens_k": ints(0, 4, 8)}, ValueError, "cu_seqlens_k ends at 8"),
        ({"cu_seqlens_k": ints(4, 0, 7)}, ValueError, "cu_seqlens_k must not decrease"),
        ({"cu_seqlens_k": ints(-1, 0, 7)}, ValueError, "cu_seqlens_k must not"),
        ({"softmax_scale": 0.0}, ValueError, "softmax_scale is 0.0"),
        ({"softmax_scale": -0.1}, ValueError, "softmax_scale"),
        ({"softmax_scale": np.nan}, ValueError, "softmax_scale"),
        ({"softmax_scale": np.inf}, ValueError, "softmax_scale"),
        ({"softmax_scale": 1e39}, ValueError, "softmax_scale"),
        ({"softmax_scale": 1e-60}, ValueError, "softmax_scale"),
        ({"softmax_scale": None}, TypeError, "softmax_scale is NoneType"),
        ({"softmax_scale": True}, TypeError, "softmax_scale is bool"),
        ({"softmax_scale": "0.1"}, TypeError, "softmax_scale is str"),
        ({"causal": 1}, TypeError, "causal is int"),
        ({"causal": None}, TypeError, "causal is NoneType"),
        ({"return_lse": "no"}, TypeError, "return_lse is str"),
        ({"return_lse": False}, ValueError, "out_lse is given"),
        ({"lse_base": 2}, ValueError, "lse_base is 2"),
        ({"lse_base": "10"}, ValueError, "lse_base"),
        ({"lse_layout": "HT"}, ValueError, "lse_layout"),
        ({"lse_layout": "BNS"}, ValueError, "lse_layout"),
        ({"lse_layout": "TN"}, ValueError, "out_lse has shape"),
        ({"q_descale": 1.0}, ValueError, "q_descale is given, but q is float32"),
        ({"v_descale": 1.0}, ValueError, "v_descale is given, but v is float32"),
        ({**CODES, "q_descale": None}, ValueError, "q_descale is missing"),
        ({**CODES, "k_descale": None}, ValueError, "k_descale is missing"),
        ({**CODES, "v_descale": None}, ValueError, "v_descale is missing"),
        ({**CODES, "v_descale": 0.0}, ValueError, "v_descale is 0.0"),
        ({**CODES, "k_descale": np.nan}, ValueError, "k_descale is nan"),
        ({**CODES, "q_descale": -1.0}, ValueError, "q_descale is -1.0"),
        ({**CODES, "q_descale": np.ones(2, np.float32)}, ValueError, "q_descale"),
        ({**CODES, "q_descale": "1"}, TypeError, "q_descale"),
        ({"out_dtype": np.float64}, TypeError, "out_dtype"),
        ({"out_dtype": "fp8"}, TypeError, "out_dtype"),
        ({"out_dtype": "float16"}, TypeError, "out is float32, expected float16"),
        ({"out": np.full((5, 2, 16), POISON)}, TypeError, "out is float64"),
        ({"out": poisoned((5, 2, 16), np.int32)}, TypeError, "out is int32"),
        ({"out": poisoned((5, 16))}, ValueError, "out has shape"),
        ({"out": poisoned((2, 5, 16))}, ValueError, "out has shape"),
        ({"out": poisoned((5, 2, 32))}, ValueError, "out has shape"),
        ({"out": poisoned((5, 2, 32))[..., ::2]}, ValueError, "out has a last axis"),
        ({"out": poisoned((5, 2, 16))[::-1]}, ValueError, "out has strides"),
        ({"out": np.broadcast_to(np.float32(POISON), (5, 2, 16))}, ValueError, "out"),
        ({"out": as_strided(ROOM, (5, 2, 16), (64, 32, 4))}, ValueError, "out has strides"),
        ({"out_lse": poisoned((5, 2))}, ValueError, "out_lse has shape"),
        ({"out_lse": poisoned((2, 5), np.float16)}, TypeError, "out_lse is float16"),
        ({"out_lse": poisoned((2, 5))[:, ::-1]}, ValueError, "out_lse has strides"),
        ({"out": GOOD["q"][..., :16]}, ValueError, "out shares memory with q"),
        ({"out": GOOD["k"][:5, :, 16:]}, ValueError, "out shares memory with k"),
        ({"out": GOOD["v"][:5]}, ValueError, "out shares memory with v"),
        ({"out_lse": GOOD["v"].reshape(-1)[3:13].reshape(2, 5)}, ValueError, "out_lse shares"),
        (
            {"out": shifted(0, (5, 2, 16)), "out_lse": shifted(159, (2, 5))},
            ValueError,
            "out shares memory with out_lse",
        ),
        ({"variant": "no such"}, ValueError, "no such"),
    ],
)
def test_bad_input_is_refused_by_name_and_nothing_is_written(change, error, names):
    given = {"out": poisoned((5, 2, 16)), "out_lse": poisoned((2, 5))}
    arguments = {**GOOD, **given, **change}
    arrays = {name: value for name, value in arguments.items() if isinstance(value, np.ndarray)}
    before = {name: array.copy() for name, array in arrays.items()}
    with pytest.raises(error, match=names):
        prefill_attention(**arguments)
    for name, array in arrays.items():
        np.testing.assert_array_equal(bits_of(array), bits_of(before[name]), err_msg=name)


class TestTorch:
    @pytest.fixture
    def torch(self):
        return pytest.importorskip("torch")

    @fast_prefill
    @pytest.mark.parametrize("name", ["float32", "bfloat16"])
    def test_tensors_give_the_results_of_arrays(self, torch, attend, name):
        if attend.target == "gpu":
            pytest.skip("tensors of this test are on the CPU")
        problem = prefill_problem([3, 2], [4, 2], DTYPES[name])
        want, want_lse = attend(**problem)
        tensors = {
            key: torch.from_numpy(value.astype(np.float32)).to(getattr(torch, name))
            if key in "qkv"
            else torch.from_numpy(value)
            for key, value in problem.items()
            if isinstance(value, np.ndarray)
        }
        tensors["k"] = torch.nn.Parameter(tensors["k"])
        out, lse = attend(**problem | tensors)
        assert isinstance(out, torch.Tensor)
        assert isinstance(lse, torch.Tensor)
        assert out.dtype == getattr(torch, name)
        assert lse.dtype == torch.float32
        np.testing.assert_array_equal(out.float().numpy(), want.astype(np.float32))
        np.testing.assert_array_equal(lse.numpy(), want_lse)
        wide = torch.full((5, 2, 24), POISON, dtype=getattr(torch, name))
        given = wide[..., :16]
        assert attend(**problem | tensors, out=given, return_lse=False) is given
        assert torch.equal(wide[..., :16], out)
        assert (wide[..., 16:] == POISON).all()

    def test_codes_of_torch(self, torch):
        problem = prefill_problem([3], [3]) | {"out_dtype": "float32"}
        scales = {f"{name}_descale": torch.tensor(1.0) for name in "qkv"}
        codes = {name: torch.from_numpy(problem[name]).to(torch.float8_e4m3fn) for name in "qkv"}
        values = {name: tensor.float().numpy() for name, tensor in codes.items()}
        out, lse = prefill_attention(**problem | codes | scales)
        want, want_lse = prefill_attention(**problem | values)
        np.testing.assert_array_equal(out.numpy(), want)
        np.testing.assert_array_equal(lse.numpy(), want_lse)

    def test_dtypes_of_torch(self, torch):
        problem = prefill_problem([3], [3])
        assert prefill_attention(**problem, out_dtype=torch.bfloat16)[0].dtype == bfloat16


def test_values_are_checked_only_where_asked_for(rng):
    """Bounds that decrease raise on a CPU unless the caller forbids to look."""
    problem = prefill_problem([1], [2]) | {"cu_seqlens_k": ints(1, 3)}
    with pytest.raises(ValueError, match="cu_seqlens_k ends at 3"):
        prefill_attention(**problem)
    problem["k"], problem["v"] = numbers(rng, (3, 2, 32)), numbers(rng, (3, 2, 16))
    prefill_attention(**problem, check_values=False)
