"""Decode attention computed in two ways: absorbed and not, in parts merged, packed, sparse."""

import numpy as np
import pytest
from attention_problems import (
    FLOAT32,
    TINY,
    absorbed_and_not,
    close,
    decode,
    decode_problem,
    decode_reference,
    fast_decode,
    ints,
    nothing_seen,
    packed_rows,
    paged,
    rows_of,
    same,
    slots_of,
    tree_words,
    with_indices,
)

from sandbox.arrays import bfloat16
from sandbox.cache_formats import FORMATS
from sandbox.kernels import lse_merge, lse_merge_k, prefill_attention
from sandbox.kernels.attention.decode_cases import TILED

L = TINY.L


@decode
def test_absorbed_is_unabsorbed(attend):
    projected, latent, w_uv = absorbed_and_not([3, 6], 2, attend.dtype, seed=1)
    out, lse = attend(**latent)
    want, want_lse = prefill_attention(**projected, variant="reference")
    heads = np.einsum("bsnl,nlv->bsnv", out.astype(np.float64), w_uv)
    close(heads.reshape(want.shape), want, attend.dtype, 4)
    close(lse, want_lse, attend.dtype, 4)


@fast_decode
@pytest.mark.parametrize(("base", "layout"), [("e", "NT"), ("2", "TN")])
def test_two_halves_of_a_cache_merged_are_the_whole(attend, base, layout):
    """Tables cut at a block; some requests lie in one half, or in none."""
    problem = decode_problem([7, 21, 0, 8, 16], attend.dtype)
    options = {"lse_base": base, "lse_layout": layout, "out_dtype": "float32"}
    out, lse = attend(**problem, **options)
    lens, table = problem["seq_lens"], problem["block_table"]
    halves = [
        attend(**problem | {"seq_lens": np.minimum(lens, 8)}, **options),
        attend(
            **problem
            | {"block_table": table[:, 2:], "seq_lens": np.maximum(lens - 8, 0).astype("i4")},
            **options,
        ),
    ]
    partials, lses = (np.stack(each) for each in zip(*halves))
    partials, conventions = partials[:, :, 0], {"lse_base": base, "lse_layout": layout}
    for merged, merged_lse in (
        lse_merge(partials[0], lses[0], partials[1], lses[1], **conventions),
        lse_merge_k(partials, lses, **conventions),
    ):
        close(merged, out[:, 0], attend.dtype)
        close(merged_lse, lse)
        nothing_seen(merged[2], merged_lse.take(2, axis=0 if layout == "TN" else 1))


@fast_decode
def test_older_keys_and_new_tokens_merged_are_the_whole(attend):
    """All queries see the first half; the causal mask is in the second one."""
    problem = decode_problem([13, 9], attend.dtype, tokens=3) | {"out_dtype": "float32"}
    out, lse = attend(**problem)
    first = attend(**problem | {"seq_lens": ints(4, 4), "causal": False})
    table = problem["block_table"][:, 1:]
    second = attend(**problem | {"block_table": table, "seq_lens": ints(9, 5)})
    (left, left_lse), (right, right_lse) = (
        (each.reshape(6, TINY.N, L), each_lse) for each, each_lse in (first, second)
    )
    merged, merged_lse = lse_merge(left, left_lse, right, right_lse)
    close(merged.reshape(out.shape), out, attend.dtype)
    close(merged_lse, lse)


@fast_decode
@pytest.mark.parametrize("sparse", [False, True])
def test_any_number_of_splits(attend, sparse):
    """More than there are keys too; a sink takes part once, whatever the parts."""
    problem = decode_problem([200, 3, 0, 75], attend.dtype, tokens=2)
    problem |= {"sink": np.array([0.5, -1, 2], np.float32), "return_key_mass": True}
    if sparse:
        chosen = np.resize(slots_of(problem, 0), (4, 2, 130)).astype(np.int32)
        chosen[1] = -1
        problem = with_indices(problem, chosen)
    whole = attend(**problem)
    for splits in (1, 2, 5, 300):
        for got, want in zip(attend(**problem, num_splits=splits), whole):
            close(got, want, attend.dtype)


@fast_decode
@pytest.mark.parametrize("name", [f.name for f in FORMATS.values() if f.packed])
def test_packed_cache_is_the_cache_that_it_decodes_to(attend, name):
    widths = TILED if FORMATS[name].tile_scales else TINY
    dtype = attend.dtype if attend.dtype == FLOAT32 else bfloat16
    rng = np.random.default_rng(4)
    values = [rng.standard_normal((n, widths.L + widths.R), np.float32) for n in (9, 0, 70)]
    rows, decoded, said = zip(*(packed_rows(name, each, widths, 0.37) for each in values))
    plain = decode_problem([9, 0, 70], tokens=2, widths=widths, seed=4)
    plain["q"] = plain["q"].astype(dtype)
    packed = plain | paged(list(rows), 4) | said[0]
    plain |= paged(list(decoded), 4) | {"q": plain["q"].astype(np.float32)}
    found, want = attend(**packed), decode_reference(**plain)
    assert found[0].dtype == dtype
    close(found[0], want[0], dtype, 2)
    close(found[1], want[1], dtype, 2)
    if dtype == FLOAT32:
        for got, also in zip(found, attend(**plain)):
            close(got, also)


@decode
def test_window_as_wide_as_the_request_is_none(attend):
    problem = decode_problem([3, 6], attend.dtype)
    for got, want in zip(attend(**problem, window=6), attend(**problem)):
        same(got, want)


@decode
def test_window_is_the_last_keys(attend):
    """Keys left of it are NaN."""
    problem = decode_problem([7, 2], attend.dtype)
    whole = with_indices(problem, [[slots_of(problem, 0)[4:]], [[*slots_of(problem, 1), -1]]])
    want = attend(**whole)
    slots = slots_of(problem, 0)[:4]
    problem["cache"][slots // 4, slots % 4] = np.nan
    for got, other in zip(attend(**problem, window=3), want):
        close(got, other, attend.dtype)


@decode
def test_one_token_is_causal_or_not(attend):
    problem = decode_problem([3, 5], attend.dtype)
    for got, want in zip(attend(**problem, causal=False), attend(**problem)):
        close(got, want, attend.dtype)


@fast_decode
@pytest.mark.parametrize("tokens", [3, 40])
def test_tree_that_is_a_chain_is_causal(attend, tokens):
    problem = decode_problem([90, 40, 2], attend.dtype, tokens=tokens)
    chain = np.broadcast_to(np.tri(tokens, dtype=bool), (3, tokens, tokens))
    for got, want in zip(attend(**problem, tree_mask=tree_words(chain)), attend(**problem)):
        close(got, want, attend.dtype)


@decode
def test_indices_of_all_slots_in_any_order_are_the_cache(attend):
    problem = decode_problem([5, 3], attend.dtype)
    chosen = np.full((2, 1, 6), -1)
    chosen[0, 0, :5], chosen[1, 0, 1:4] = slots_of(problem, 0), slots_of(problem, 1)
    want = attend(**problem)
    for order in (range(6), [4, 1, 5, 0, 2, 3]):
        for got, other in zip(attend(**with_indices(problem, chosen[..., order])), want):
            close(got, other, attend.dtype)


@fast_decode
def test_indices_of_each_query_are_a_causal_mask(attend):
    problem = decode_problem([70], attend.dtype, tokens=3)
    chosen = np.stack([np.where(np.arange(70) < 68 + i, slots_of(problem, 0), -1)
                       for i in range(3)])[None]  # fmt: skip
    for got, want in zip(attend(**with_indices(problem, chosen)), attend(**problem)):
        close(got, want, attend.dtype)


@decode
def test_slot_named_twice_is_two_keys(attend):
    problem = decode_problem([1], attend.dtype)
    _, once = attend(**problem)
    out, lse = attend(**with_indices(problem, np.full((1, 1, 5), slots_of(problem, 0)[0])))
    close(lse, once + np.log(5))
    close(out[0, 0], np.tile(rows_of(problem, 0)[:, :L], (TINY.N, 1)), attend.dtype)
