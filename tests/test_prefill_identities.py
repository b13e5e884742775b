"""Prefill attention computed in two ways: absorbed and not, in chunks merged, padded."""

import numpy as np
import pytest
from attention_problems import (
    FLOAT32,
    SCALE,
    absorbed_and_not,
    bounds,
    close,
    fast_prefill,
    poisoned,
    prefill,
    prefill_problem,
    prefill_reference,
    same,
)

from sandbox.kernels import decode_attention, lse_merge, lse_merge_k


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


@prefill
def test_unabsorbed_is_absorbed(attend):
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
def test_chunks_merged_are_the_whole(attend, cuts, scale, base, layout):
    """The third request has no context: its chunks are all empty."""
    context_lens, query_lens = [11, 6, 0], [5, 1, 4]
    whole = prefill_problem(query_lens, np.add(context_lens, query_lens).tolist(), attend.dtype) | {
        "softmax_scale": scale,
        "lse_base": base,
        "lse_layout": layout,
    }
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
def test_prefix_of_three_equal_keys_and_a_suffix_of_one(attend):
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
def test_one_query_sees_all_keys_causal_or_not(attend):
    problem = prefill_problem([1, 1], [3, 1], attend.dtype)
    for causal, other in zip(attend(**problem), attend(**problem, causal=False)):
        close(causal, other, attend.dtype)


@fast_prefill
def test_padded_values_and_any_strides(attend):
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
def test_padded_results_through_a_merge(attend):
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
def test_layout_is_what_the_caller_says_where_no_shape_tells(attend):
    problem = prefill_problem([4], [4], attend.dtype, heads=4)
    out, lse = attend(**problem)
    by_token, by_token_lse = attend(**problem, lse_layout="TN")
    same(by_token, out)
    same(by_token_lse, lse.T.copy())
    assert np.abs(lse - lse.T).max() > 0.1
    close(lse, prefill_reference(**problem)[1])


@prefill
def test_base_2_is_base_e_in_other_units(attend):
    problem = prefill_problem([2, 1], [2, 3], attend.dtype)
    out, lse = attend(**problem)
    other, other_lse = attend(**problem, lse_base="2")
    same(other, out)
    close(other_lse, lse / np.log(2))


@fast_prefill
def test_without_lse_the_results_are_the_same(attend):
    problem = prefill_problem([3, 70], [5, 70], attend.dtype)
    same(attend(**problem, return_lse=False), attend(**problem)[0])
