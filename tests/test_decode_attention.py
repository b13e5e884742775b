"""What is special to decode attention: identities, determinism, hostile caches, refusals."""

import numpy as np
import pytest
from attention_problems import (
    FLOAT32,
    POISON,
    SCALE,
    TINY,
    absorbed_and_not,
    attention,
    close,
    decode,
    decode_problem,
    fast_decode,
    host_decode,
    ints,
    nothing_seen,
    only,
    packed_rows,
    paged,
    poisoned,
    rows_of,
    same,
    slots_of,
    tree_words,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from sandbox.arrays import DTYPES, bfloat16
from sandbox.cache_formats import E4M3, FORMATS, Widths
from sandbox.kernels import decode_attention, lse_merge, lse_merge_k, prefill_attention
from sandbox.kernels.attention.decode_cases import TILED
from sandbox.kernels.case import GARBAGE_BLOCK
from sandbox.kernels.conformance import bits_of
from sandbox.kernels.cuda import host_options

L, E = TINY.L, TINY.E
NO_BLOCKS = {"block_table": None, "seq_lens": None}


def reference(**arguments):
    return decode_attention(**arguments, variant="reference")


def with_indices(problem, indices):
    return problem | NO_BLOCKS | {"indices": np.ascontiguousarray(indices, dtype=np.int32)}


def expected(problem, sees):
    """Results and LSEs `[N, B * S]` where query `i` of request `b` sees position `j` if
    `sees(b, i, j)`, in float64."""
    requests, tokens, heads, _ = problem["q"].shape
    out = np.zeros((requests, tokens, heads, L))
    lse = np.full((heads, requests, tokens), -np.inf)
    for b in range(requests):
        rows = rows_of(problem, b).astype(np.float64)
        for i in range(tokens):
            seen = rows[[sees(b, i, j) for j in range(len(rows))]] if len(rows) else rows
            if len(seen):
                scores = problem["softmax_scale"] * problem["q"][b, i].astype(np.float64) @ seen.T
                out[b, i], lse[:, b, i] = attention(scores, seen[:, :L])
    return out, lse.reshape(heads, -1)


class TestIdentities:
    @decode
    def test_absorbed_is_unabsorbed(self, attend):
        projected, latent, w_uv = absorbed_and_not([3, 6], 2, attend.dtype, seed=1)
        out, lse = attend(**latent)
        want, want_lse = prefill_attention(**projected, variant="reference")
        heads = np.einsum("bsnl,nlv->bsnv", out.astype(np.float64), w_uv)
        close(heads.reshape(want.shape), want, attend.dtype, 4)
        close(lse, want_lse, attend.dtype, 4)

    @fast_decode
    @pytest.mark.parametrize(("base", "layout"), [("e", "NT"), ("2", "TN")])
    def test_two_halves_of_a_cache_merged_are_the_whole(self, attend, base, layout):
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
    def test_older_keys_and_new_tokens_merged_are_the_whole(self, attend):
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
    def test_any_number_of_splits(self, attend, sparse):
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
    def test_packed_cache_is_the_cache_that_it_decodes_to(self, attend, name):
        widths = TILED if FORMATS[name].tile_scales else TINY
        dtype = attend.dtype if attend.dtype == FLOAT32 else bfloat16
        rng = np.random.default_rng(4)
        values = [rng.standard_normal((n, widths.L + widths.R), np.float32) for n in (9, 0, 70)]
        rows, decoded, said = zip(*(packed_rows(name, each, widths, 0.37) for each in values))
        plain = decode_problem([9, 0, 70], tokens=2, widths=widths, seed=4)
        plain["q"] = plain["q"].astype(dtype)
        packed = plain | paged(list(rows), 4) | said[0]
        plain |= paged(list(decoded), 4) | {"q": plain["q"].astype(np.float32)}
        found, want = attend(**packed), reference(**plain)
        assert found[0].dtype == dtype
        close(found[0], want[0], dtype, 2)
        close(found[1], want[1], dtype, 2)
        if dtype == FLOAT32:
            for got, also in zip(found, attend(**plain)):
                close(got, also)

    @decode
    def test_window_as_wide_as_the_request_is_none(self, attend):
        problem = decode_problem([3, 6], attend.dtype)
        for got, want in zip(attend(**problem, window=6), attend(**problem)):
            same(got, want)

    @decode
    def test_window_is_the_last_keys(self, attend):
        """Keys left of it are NaN."""
        problem = decode_problem([7, 2], attend.dtype)
        whole = with_indices(problem, [[slots_of(problem, 0)[4:]], [[*slots_of(problem, 1), -1]]])
        want = attend(**whole)
        slots = slots_of(problem, 0)[:4]
        problem["cache"][slots // 4, slots % 4] = np.nan
        for got, other in zip(attend(**problem, window=3), want):
            close(got, other, attend.dtype)

    @decode
    def test_one_token_is_causal_or_not(self, attend):
        problem = decode_problem([3, 5], attend.dtype)
        for got, want in zip(attend(**problem, causal=False), attend(**problem)):
            close(got, want, attend.dtype)

    @fast_decode
    @pytest.mark.parametrize("tokens", [3, 40])
    def test_tree_that_is_a_chain_is_causal(self, attend, tokens):
        problem = decode_problem([90, 40, 2], attend.dtype, tokens=tokens)
        chain = np.broadcast_to(np.tri(tokens, dtype=bool), (3, tokens, tokens))
        for got, want in zip(attend(**problem, tree_mask=tree_words(chain)), attend(**problem)):
            close(got, want, attend.dtype)

    @decode
    def test_indices_of_all_slots_in_any_order_are_the_cache(self, attend):
        problem = decode_problem([5, 3], attend.dtype)
        chosen = np.full((2, 1, 6), -1)
        chosen[0, 0, :5], chosen[1, 0, 1:4] = slots_of(problem, 0), slots_of(problem, 1)
        want = attend(**problem)
        for order in (range(6), [4, 1, 5, 0, 2, 3]):
            for got, other in zip(attend(**with_indices(problem, chosen[..., order])), want):
                close(got, other, attend.dtype)

    @fast_decode
    def test_indices_of_each_query_are_a_causal_mask(self, attend):
        problem = decode_problem([70], attend.dtype, tokens=3)
        chosen = np.stack([np.where(np.arange(70) < 68 + i, slots_of(problem, 0), -1)
                           for i in range(3)])[None]  # fmt: skip
        for got, want in zip(attend(**with_indices(problem, chosen)), attend(**problem)):
            close(got, want, attend.dtype)

    @decode
    def test_slot_named_twice_is_two_keys(self, attend):
        problem = decode_problem([1], attend.dtype)
        _, once = attend(**problem)
        out, lse = attend(**with_indices(problem, np.full((1, 1, 5), slots_of(problem, 0)[0])))
        close(lse, once + np.log(5))
        close(out[0, 0], np.tile(rows_of(problem, 0)[:, :L], (TINY.N, 1)), attend.dtype)


class TestSink:
    @decode
    def test_without_weight_it_is_none(self, attend):
        problem = decode_problem([3, 0], attend.dtype)
        sink = np.full(TINY.N, -np.inf, np.float32)
        for got, want in zip(attend(**problem, sink=sink), attend(**problem)):
            same(got, want)

    @decode
    @pytest.mark.parametrize("logit", [500.0, 1e30, np.inf])
    def test_of_all_weight_leaves_nothing(self, attend, logit):
        problem = decode_problem([5, 0], attend.dtype)
        sink = np.full(TINY.N, logit, np.float32)
        out, lse = attend(**problem, sink=sink)
        close(out, np.zeros(out.shape))
        same(lse, attend(**problem)[1])

    @decode
    def test_takes_the_share_of_one_more_key(self, attend):
        """Each head has its own; the LSE is without it."""
        problem = decode_problem([4, 6], attend.dtype)
        out, lse = attend(**problem, out_dtype="float32")
        sink = np.array([-2.0, 0.5, 3.0], np.float32)
        for splits in (None, 2):
            shrunk, other = attend(**problem, sink=sink, num_splits=splits, out_dtype="float32")
            share = 1 / (1 + np.exp(sink[:, None] - lse)).T[:, None, :, None]
            close(shrunk, share * out, attend.dtype)
            close(other, lse)


class TestKeyMass:
    @decode
    def test_is_the_probabilities_summed_over_heads(self, attend):
        """0 where there is no key, where a query sees none, and beyond the request."""
        problem = decode_problem([6, 1, 0], attend.dtype, tokens=2)
        given = {"key_mass": poisoned((3, 2, 11))}
        _, lse, mass = attend(**problem, **given)
        assert mass.shape == (3, 2, 11)
        for b, i, end in ((0, 0, 5), (0, 1, 6), (1, 0, 0), (1, 1, 1), (2, 0, 0), (2, 1, 0)):
            keys = rows_of(problem, b)[:end].astype(np.float64)
            scores = SCALE * problem["q"][b, i].astype(np.float64) @ keys.T
            weights = np.exp(scores - lse.reshape(TINY.N, 3, 2)[:, b, i, None].astype(np.float64))
            close(mass[b, i, :end], weights.sum(axis=0) if end else [], attend.dtype)
            assert not bits_of(mass[b, i, end:]).any()
        totals = np.array([[TINY.N, TINY.N], [0, TINY.N], [0, 0]])
        close(mass.sum(axis=-1), totals, attend.dtype)
        same(given["key_mass"], mass)

    @fast_decode
    def test_of_holes_is_zero_and_sinks_take_their_part(self, attend):
        problem = decode_problem([70, 9], attend.dtype, tokens=2)
        sink = np.array([0.5, -1, 2], np.float32)
        rng = np.random.default_rng(0)
        chosen = rng.choice(slots_of(problem, 0), (2, 2, 60))
        holes = rng.random(chosen.shape) < 0.3
        chosen[holes] = rng.choice([-1, -7, -(2**31)], int(holes.sum()))
        sparse = with_indices(problem, chosen)
        for each, unseen in ((problem, None), (sparse, holes)):
            _, lse, mass = attend(**each, sink=sink, return_key_mass=True)
            kept = (1 / (1 + np.exp(sink[:, None] - lse))).sum(axis=0)
            close(mass.sum(axis=-1).reshape(-1), kept, attend.dtype)
            if unseen is not None:
                assert not bits_of(mass)[unseen].any()
                assert (mass[~unseen] > 0).all()

    @fast_decode
    def test_without_lse_it_is_the_same(self, attend):
        problem = decode_problem([9, 5], attend.dtype) | {"return_key_mass": True}
        out, mass = attend(**problem, return_lse=False)
        want = attend(**problem)
        same(out, want[0])
        same(mass, want[2])


MASKS = {
    "causal": {},
    "all": {"causal": False},
    "tree": {"tree": True},
    "window": {"window": 3},
    "window of all": {"window": 3, "causal": False},
    "window of a tree": {"window": 4, "tree": True},
}


class TestWhoSeesWhat:
    def sees(self, problem, options, seen):
        lens, tokens = problem["seq_lens"].tolist(), problem["q"].shape[1]

        def answer(b, i, j):
            own, new = lens[b] - tokens + i, j - (lens[b] - tokens)
            if seen is not None:
                visible = new < 0 or seen[b, i, new]
            else:
                visible = j <= own or not options.get("causal", True)
            return visible and j > own - options.get("window", 10**9)

        return answer

    def check(self, attend, problem, options):
        options = dict(options)
        seen = None
        if options.pop("tree", False):
            requests, tokens = problem["q"].shape[:2]
            seen = np.random.default_rng(5).random((requests, tokens, tokens)) < 0.4
            seen[0, 1] = False
            options["tree_mask"] = tree_words(seen)
        out, lse = attend(**problem, **options)
        want, want_lse = expected(problem, self.sees(problem, options, seen))
        close(out, want, attend.dtype)
        close(lse, want_lse)
        unseen = want_lse == -np.inf
        nothing_seen(out.reshape(-1, *out.shape[2:]).swapaxes(0, 1)[unseen], lse[unseen])

    @decode
    @pytest.mark.parametrize("mask", MASKS)
    def test_few_keys(self, attend, mask):
        """The last request is shorter than it has queries: the first ones see nothing."""
        problem = decode_problem([7, 2], attend.dtype, tokens=3, heads=1, seed=6)
        self.check(attend, problem, MASKS[mask])

    @fast_decode
    @pytest.mark.parametrize("mask", MASKS)
    def test_more_keys_than_a_tile_and_more_tokens_than_a_word(self, attend, mask):
        problem = decode_problem([140, 40, 0, 35, 1], attend.dtype, tokens=40, seed=7)
        self.check(attend, problem, MASKS[mask])

    @fast_decode
    def test_bits_of_no_token_mean_nothing(self, attend):
        problem = decode_problem([9], attend.dtype, tokens=3)
        words = tree_words(np.tri(3, dtype=bool)[None])
        want = attend(**problem, tree_mask=words)
        for got, other in zip(attend(**problem, tree_mask=words | ~np.int32(7)), want):
            same(got, other)


class TestDeterminism:
    """Bits of a request's results with `deterministic=True` are its own affair."""

    def problem(self, attend, lens, **options):
        return decode_problem(lens, attend.dtype, **options) | {
            "deterministic": True, "return_key_mass": True, "lse_layout": "BNS",
        }  # fmt: skip

    def check(self, attend, problem, requests, want, **options):
        """The problem's requests have, one for one, the results `want` of those named."""
        out, lse, mass = attend(**problem, **options)
        same(out, want[0][requests])
        same(lse, want[1][requests])
        common = min(mass.shape[2], want[2].shape[2])
        same(mass[..., :common].copy(), want[2][requests, :, :common].copy())
        assert not mass[..., common:].any()

    @fast_decode
    @pytest.mark.parametrize("options", [{}, {"window": 1300}], ids=["all", "window"])
    def test_alone_in_a_batch_and_in_any_order(self, attend, options):
        problem = self.problem(attend, [2100, 5, 0, 1030, 1024], tokens=2) | options
        want = attend(**problem)
        for request in range(5):
            self.check(attend, only(problem, [request]), [request], want)
        self.check(attend, only(problem, [3, 0, 4, 2, 1]), [3, 0, 4, 2, 1], want)
        self.check(attend, only(problem, [1, 0, 0, 0]), [1, 0, 0, 0], want)

    @decode
    def test_alone_and_in_a_small_batch(self, attend):
        problem = self.problem(attend, [6, 3])
        want = attend(**problem)
        for request in range(2):
            self.check(attend, only(problem, [request]), [request], want)

    @fast_decode
    @pytest.mark.parametrize("splits", [1, 2, 7])
    def test_with_any_splits(self, attend, splits):
        problem = self.problem(attend, [2100, 5, 0, 1030])
        self.check(attend, problem, range(4), attend(**problem), num_splits=splits)

    @fast_decode
    def test_with_wider_tables_and_a_longest_length(self, attend):
        problem = self.problem(attend, [2100, 5, 0, 1030])
        want = attend(**problem)
        table = problem["block_table"]
        wide = np.full((4, table.shape[1] + 1500), GARBAGE_BLOCK, np.int32)
        wide[:, : table.shape[1]] = table
        narrow = np.ascontiguousarray(table[:, : -(-2100 // 4)])
        for each in (table, wide, narrow):
            for longest in (None, 2100, 2101, 5000, 10**9):
                some = problem | {"block_table": each, "max_seq_len": longest}
                self.check(attend, some, range(4), want)
        short = only(problem, [1, 2]) | {"max_seq_len": 5}
        self.check(attend, short, [1, 2], want)

    @fast_decode
    def test_of_named_keys(self, attend):
        problem = decode_problem([1500], attend.dtype, tokens=3)
        chosen = np.random.default_rng(1).choice(slots_of(problem, 0), (3, 1, 1300))
        chosen[1, 0, 200:] = -1
        queries = problem["q"].swapaxes(0, 1)
        problem |= NO_BLOCKS | {"deterministic": True, "lse_layout": "BNS"}
        chosen = chosen.astype(np.int32)
        want = attend(**problem | {"q": queries, "indices": chosen})
        for requests in ([0], [1], [2], [2, 0, 1]):
            some = {"q": queries[requests].copy(), "indices": chosen[requests]}
            for splits in (None, 3):
                for got, other in zip(attend(**problem | some, num_splits=splits), want):
                    same(got, other[requests])


class TestHostileCache:
    @decode
    def test_padding_requests(self, attend):
        """No keys, block ids -1, results that held NaN: exactly 0 and -inf."""
        problem = decode_problem([3, 0, 0, 0], attend.dtype)
        problem["block_table"][1:] = -1
        shape = (4, 1, TINY.N, L)
        given = {"out": poisoned(shape, attend.dtype), "out_lse": poisoned((TINY.N, 4))}
        alone = attend(**only(problem, [0]))
        attend(**problem, **given)
        close(given["out"][0], alone[0][0], attend.dtype)
        close(given["out_lse"][:, :1], alone[1])
        nothing_seen(given["out"][1:], given["out_lse"][:, 1:])

    @decode
    def test_what_no_query_sees_never_matters(self, attend):
        """Free pages, rows past the length and left of the window, table columns past the end."""
        problem = decode_problem([7, 2], attend.dtype, tokens=2) | {"window": 3}
        want = attend(**problem)
        seen = np.zeros(problem["cache"].shape[:2], bool)
        for request, first in ((0, 3), (1, 0)):
            slots = slots_of(problem, request)[first:]
            seen[slots // 4, slots % 4] = True
        for garbage in (np.nan, np.inf, 7.0):
            problem["cache"][~seen] = garbage
            table = problem["block_table"]
            for ids in (-1, GARBAGE_BLOCK, 0, -(2**31)):
                table[0, 2:] = table[1, 1:] = ids
            for got, other in zip(attend(**problem), want):
                same(got, other)

    @decode
    @pytest.mark.parametrize("garbage", [-1, -(2**31), 4, GARBAGE_BLOCK, 2**31 - 1])
    def test_id_of_no_block_holds_no_key(self, attend, garbage):
        problem = decode_problem([10, 3], attend.dtype, spare=1)
        problem["cache"] = problem["cache"][:4]
        problem["block_table"] = ints([3, garbage, 0], [garbage, 1, 1])
        problem["cache"][3], problem["cache"][0] = (
            np.random.default_rng(seed).standard_normal((4, E)) for seed in (1, 2)
        )
        slots = ints(*range(12, 16), 0, 1)
        rows = problem["cache"].reshape(-1, E)[slots].astype(np.float64)
        out, lse, mass = attend(**problem, check_values=False, return_key_mass=True)
        scores = SCALE * problem["q"][0, 0].astype(np.float64) @ rows.T
        want, want_lse = attention(scores, rows[:, :L])
        close(out[0, 0], want, attend.dtype)
        close(lse[:, 0], want_lse)
        nothing_seen(out[1], lse[:, 1])
        assert not bits_of(mass[0, 0, 4:8]).any()
        assert not bits_of(mass[1]).any()
        close(mass[0, 0, :10].sum(), TINY.N, attend.dtype)

    @fast_decode
    def test_holes_of_many_blocks(self, attend):
        """Blocks that are not there at the start, in the middle and at the end of many tiles."""
        problem = decode_problem([600, 300], attend.dtype, tokens=2)
        table = problem["block_table"]
        gone = np.random.default_rng(2).random(table.shape) < 0.5
        gone[0, 20:60] = gone[1, :40] = True
        lens = problem["seq_lens"]
        want = expected(problem, lambda b, i, j: not gone[b, j // 4] and j <= lens[b] - 2 + i)
        holey = problem | {"block_table": np.where(gone, np.int32(-1), table)}
        for splits in (None, 4):
            for got, other in zip(attend(**holey, num_splits=splits), want):
                close(got, other, attend.dtype)

    @decode
    def test_table_too_narrow_holds_no_more_keys(self, attend):
        problem = decode_problem([10], attend.dtype)
        narrow = problem | {"block_table": problem["block_table"][:, :1]}
        found = attend(**narrow, check_values=False)
        for got, want in zip(found, attend(**problem | {"seq_lens": ints(4)})):
            close(got, want, attend.dtype)

    @fast_decode
    def test_order_of_pages(self, attend):
        problem = decode_problem([30, 0, 17], attend.dtype, tokens=2)
        rows = [rows_of(problem, request) for request in range(3)]
        want = attend(**problem)
        for seed in (1, 2):
            for got, other in zip(attend(**problem | paged(rows, 4, seed=seed)), want):
                same(got, other)

    @fast_decode
    def test_pages_that_requests_share(self, attend):
        problem = decode_problem([13, 8], attend.dtype)
        problem["block_table"][1, :2] = problem["block_table"][0, :2]
        for got, want in zip(attend(**problem), expected(problem, lambda b, i, j: True)):
            close(got, want, attend.dtype)

    @fast_decode
    @pytest.mark.parametrize("name", ["q", "cache"])
    def test_nan_stays_in_its_request(self, attend, name):
        problem = decode_problem([40, 70, 150], attend.dtype, tokens=2)
        want = attend(**problem, lse_layout="BNS")
        if name == "q":
            problem["q"][1, 0, 1] = np.nan
        else:
            slot = slots_of(problem, 1)[33]
            problem["cache"][slot // 4, slot % 4] = np.nan
        found = attend(**problem, lse_layout="BNS")
        for got, other in zip(found, want):
            same(got[[0, 2]], other[[0, 2]])
            assert np.isnan(got[1]).any()

    @fast_decode
    @pytest.mark.parametrize("block_size", [1, 3, 16, 64, 100])
    @pytest.mark.parametrize("sparse", [False, True])
    def test_any_block_size(self, attend, block_size, sparse):
        lens = [130, 0, 64, 1]
        problem = decode_problem(lens, attend.dtype, block_size=block_size, seed=block_size)
        want = expected(problem, lambda b, i, j: True)
        if sparse:
            chosen = np.full((4, 1, 131), -1)
            for request, length in enumerate(lens):
                chosen[request, 0, 131 - length :] = slots_of(problem, request)
            problem = with_indices(problem, chosen)
        for got, other in zip(attend(**problem), want):
            close(got, other, attend.dtype)


class TestShapes:
    @fast_decode
    @pytest.mark.parametrize("heads", [1, 3, 9, 63, 64, 65, 126])
    def test_any_number_of_heads(self, attend, heads):
        problem = decode_problem([70, 3], attend.dtype, heads=heads, seed=heads)
        for got, want in zip(attend(**problem), expected(problem, lambda b, i, j: True)):
            close(got, want, attend.dtype)

    @fast_decode
    @pytest.mark.parametrize(
        "lens", [[1], [31, 32, 33], [63, 64, 65, 1, 2], [127, 128, 129], [0, 257, 0, 0, 5], [0, 0]],
        ids=str,
    )  # fmt: skip
    def test_lengths_around_every_tile(self, attend, lens):
        problem = decode_problem(lens, attend.dtype, seed=len(lens))
        want = expected(problem, lambda b, i, j: True)
        for splits in (None, 3):
            for got, other in zip(attend(**problem, num_splits=splits), want):
                close(got, other, attend.dtype)

    @fast_decode
    def test_more_requests_than_blocks_of_threads(self, attend):
        lens = [37 * i % 23 for i in range(300)]
        problem = decode_problem(lens, attend.dtype)
        for got, want in zip(attend(**problem), expected(problem, lambda b, i, j: True)):
            close(got, want, attend.dtype)

    @decode
    @pytest.mark.parametrize(("requests", "tokens"), [(0, 1), (2, 0), (0, 0)])
    def test_no_queries(self, attend, requests, tokens):
        problem = decode_problem([2, 3], attend.dtype, tokens=tokens)
        problem = only(problem, range(requests)) | {"return_key_mass": True}
        out, lse, mass = attend(**problem, lse_layout="BNS")
        assert out.shape == (requests, tokens, TINY.N, L)
        assert lse.shape == (requests, TINY.N, tokens)
        assert mass.shape == (requests, tokens, 12)

    @decode
    @pytest.mark.parametrize(
        "change",
        [
            {"block_table": np.zeros((2, 0), np.int32), "seq_lens": ints(0, 0)},
            {"block_table": np.zeros((2, 0), np.int32), "seq_lens": ints(3, 1)},
            {"block_table": ints([-1], [-1]), "seq_lens": ints(2, 0), "cache": None},
            {**NO_BLOCKS, "indices": np.zeros((2, 1, 0), np.int32)},
            {**NO_BLOCKS, "indices": np.full((2, 1, 3), -1, np.int32)},
            {**NO_BLOCKS, "indices": np.full((2, 1, 3), -1, np.int32), "cache": None},
        ],
        ids=["no table", "table too narrow", "no cache", "no entries", "holes", "holes, no cache"],
    )
    def test_no_keys(self, attend, change):
        problem = decode_problem([2, 3], attend.dtype)
        if "cache" in change:
            change = change | {"cache": problem["cache"][:0]}
        problem = problem | change | {"return_key_mass": True}
        out, lse, mass = attend(**problem, check_values=False)
        nothing_seen(out, lse)
        assert not mass.any()

    @fast_decode
    @settings(max_examples=12, deadline=None, database=None, derandomize=True)
    @given(
        lens=st.lists(st.integers(0, 150), min_size=1, max_size=5),
        tokens=st.integers(1, 4),
        causal=st.booleans(),
        window=st.sampled_from([None, 1, 5, 70]),
        sunk=st.booleans(),
        splits=st.sampled_from([None, 1, 4]),
        longest=st.booleans(),
        seed=st.integers(0, 99),
    )
    def test_random_batches(
        self, attend, lens, tokens, causal, window, sunk, splits, longest, seed
    ):
        problem = decode_problem(lens, attend.dtype, tokens=tokens, seed=seed)
        problem |= {"causal": causal, "window": window, "num_splits": splits}
        problem |= {"return_key_mass": True, "max_seq_len": max(lens) if longest else None}
        if sunk:
            problem["sink"] = np.random.default_rng(seed).standard_normal(TINY.N, np.float32)
        for got, want in zip(attend(**problem), reference(**problem)):
            close(got, want, attend.dtype, TINY.N)


class TestScores:
    @decode
    def test_equal_keys(self, attend):
        problem = decode_problem([4], attend.dtype)
        row = rows_of(problem, 0)[:1]
        problem |= paged([np.repeat(row, 4, axis=0)], 4)
        problem["q"][:, :, 0] = 0
        out, lse = attend(**problem)
        scores = SCALE * problem["q"][0, 0].astype(np.float64) @ row[0].astype(np.float64)
        close(lse[:, 0], scores + np.log(4))
        close(lse[0, 0], np.log(4))
        close(out[0, 0], np.tile(row[:, :L], (TINY.N, 1)), attend.dtype)

    @fast_decode
    @pytest.mark.parametrize("sign", [1, -1])
    @pytest.mark.parametrize("rising", [True, False])
    @pytest.mark.parametrize("splits", [None, 1, 3])
    def test_huge_scores_are_finite(self, attend, sign, rising, splits):
        """Scores from 0 to 10000, or -10000, larger or smaller from tile to tile."""
        problem = decode_problem([201], attend.dtype) | {"softmax_scale": 1.0}
        steps = np.arange(201) if rising else np.arange(201)[::-1]
        rows = np.random.default_rng(0).standard_normal((201, E)).astype(attend.dtype)
        rows[:, -1] = steps
        problem |= paged([rows], 4)
        problem["q"][...] = 0
        problem["q"][..., -1] = 50 * sign
        out, lse = attend(**problem, num_splits=splits)
        top = int(np.argmax(sign * steps))
        close(out[0, 0], np.tile(rows[top, :L], (TINY.N, 1)), attend.dtype)
        close(lse, np.full((TINY.N, 1), 10000.0 if sign > 0 else 0.0))

    @fast_decode
    @pytest.mark.parametrize("splits", [None, 3])
    def test_far_below_zero_is_not_nothing(self, attend, splits):
        problem = decode_problem([130], attend.dtype) | {"softmax_scale": 1.0}
        rows = np.random.default_rng(0).standard_normal((130, E)).astype(attend.dtype)
        rows[:, -1] = 100
        problem |= paged([rows], 4)
        problem["q"][...] = 0
        problem["q"][..., -1] = -100
        out, lse = attend(**problem, num_splits=splits)
        mean = rows[:, :L].astype(np.float64).mean(axis=0)
        close(out[0, 0], np.tile(mean, (TINY.N, 1)), attend.dtype)
        close(lse, np.full((TINY.N, 1), np.log(130) - 10000))

    @fast_decode
    def test_each_scale_where_it_belongs(self, attend):
        """Scores have those of queries and of rows, results that of rows."""
        rng = np.random.default_rng(3)
        values = rng.standard_normal((9, E), np.float32)
        rows, decoded, said = packed_rows("fp8_e4m3", values, TINY, 4.0)
        problem = decode_problem([9], tokens=2, seed=3)
        codes = E4M3.quantise(problem["q"], np.float32(0.125))
        queries = E4M3.decode(codes).astype(np.float32) * np.float32(0.125)
        want, want_lse = reference(**problem | paged([decoded], 4) | {"q": queries})
        packed = problem | paged([rows], 4) | said | {"q": codes, "q_descale": 0.125}
        out, lse = attend(**packed, out_dtype="float32")
        close(out, want, bfloat16, 4)
        close(lse, want_lse)
        assert attend(**packed, return_lse=False).dtype == bfloat16


class TestScalars:
    @decode
    def test_softmax_scale_of_any_kind(self, attend):
        problem = decode_problem([3], attend.dtype, heads=1)
        want = attend(**problem)
        for kind in (np.float64, np.float32):
            for got, other in zip(attend(**problem | {"softmax_scale": kind(SCALE)}), want):
                same(got, other)

    @fast_decode
    def test_descales_of_any_kind(self, attend):
        torch = pytest.importorskip("torch")
        problem = decode_problem([9])
        values = np.random.default_rng(1).standard_normal((9, E), np.float32)
        rows, _, said = packed_rows("fp8_e4m3", values, TINY, 0.37)
        problem |= paged([rows], 4) | said
        problem["q"] = E4M3.quantise(problem["q"], np.float32(0.13))
        kinds = (
            float,
            np.float64,
            lambda x: np.array([x], np.float32),
            *([] if attend.target == "gpu" else [lambda x: torch.tensor(x)]),
        )
        found = [
            attend(**problem | {"k_scale": kind(0.37)}, q_descale=kind(0.13)) for kind in kinds
        ]
        for each in found[1:]:
            for got, want in zip(each, found[0]):
                same(got, want)

    @fast_decode
    def test_integers_of_any_kind(self, attend):
        problem = decode_problem([9, 40], attend.dtype)
        options = {"window": 5, "num_splits": 2, "max_seq_len": 40, "kv_lora_rank": L}
        want = attend(**problem | options)
        numpys = {name: np.int64(value) for name, value in options.items()}
        for got, other in zip(attend(**problem | numpys), want):
            same(got, other)
        for got, other in zip(attend(**problem | options | {"window": 2**40}), attend(**problem)):
            close(got, other, attend.dtype)


CHECKED = [
    pytest.param([1], "bfloat16", Widths(40, 8), id="one key"),
    pytest.param([20] * 9, "bfloat16", Widths(8, 8), id="narrow rows"),
    pytest.param([20] * 9, "int8_per_token", Widths(8, 8), id="narrow codes"),
    pytest.param([20] * 9, "fp8_ds_mla", Widths(128, 8), id="keys at a multiple of 4 bytes"),
]
"""Problems of 16-bit queries that the cases of the conformance tests have nothing like."""


class TestCheckedBuild:
    @host_decode
    @pytest.mark.parametrize(("lens", "name", "widths"), CHECKED)
    def test_finds_no_fault(self, attend, lens, name, widths):
        """Nothing read that was not written, no access at an address that a GPU would refuse."""
        problem = decode_problem(lens, bfloat16, widths=widths)
        if FORMATS[name].packed:
            values = np.random.default_rng(0).standard_normal(
                (lens[0], widths.L + widths.R), np.float32
            )
            rows, _, said = packed_rows(name, values, widths, 1.0)
            problem |= paged([rows] * len(lens), 4) | said
        with host_options(checked=True, seed=1, global_races=True):
            found = attend(**problem)
        for got, want in zip(found, reference(**problem)):
            close(got, want, bfloat16)


class TestMemory:
    @fast_decode
    @pytest.mark.parametrize("layout", ["NT", "TN", "BNS"])
    def test_strides_of_every_array(self, attend, layout):
        """Padding is NaN before and after, in arrays that are read and in arrays that are not."""
        problem = decode_problem([9, 0, 70], attend.dtype, tokens=2) | {"lse_layout": layout}
        want = attend(**problem, return_key_mass=True)
        pad = 8
        wide_q = poisoned((TINY.N, 3, 2, E + pad), attend.dtype)
        q = wide_q.transpose(1, 2, 0, 3)[..., :E]
        q[...] = problem["q"]
        blocks = problem["cache"].shape[0]
        wide_cache = poisoned((blocks, 5, E + pad), attend.dtype)
        cache = wide_cache[:, :4, :E]
        cache[...] = problem["cache"]
        wide_out = poisoned((TINY.N, 3, 2, L + pad), attend.dtype)
        wide_lse = poisoned((*want[1].shape[:-1], 2 * want[1].shape[-1]))
        wide_mass = poisoned((3, 3, 80))
        given = {
            "out": wide_out.transpose(1, 2, 0, 3)[..., :L],
            "out_lse": wide_lse[..., ::2],
            "key_mass": wide_mass[:, :2, :76],
        }
        attend(**problem | {"q": q, "cache": cache}, **given)
        close(given["out"], want[0], attend.dtype)
        close(given["out_lse"], want[1])
        columns = min(76, want[2].shape[2])
        close(given["key_mass"][..., :columns], want[2][..., :columns], attend.dtype)
        for hole in (wide_out[..., L:], wide_lse[..., 1::2], wide_mass[:, 2], wide_mass[..., 76:]):
            assert np.isnan(hole.astype(np.float32)).all()

    @decode
    def test_layouts_and_bases_are_one_lse(self, attend):
        problem = decode_problem([3, 5], attend.dtype, tokens=2)
        out, lse = attend(**problem)
        for layout, turned in (
            ("TN", lse.T),
            ("BNS", lse.reshape(TINY.N, 2, 2).swapaxes(0, 1)),
        ):
            found = attend(**problem, lse_layout=layout)
            same(found[0], out)
            same(found[1], turned.copy())
        found = attend(**problem, lse_base="2")
        same(found[0], out)
        close(found[1], lse / np.log(2))

    @decode
    def test_offsets_of_more_than_32_bits(self, attend):
        """Requests and pages 2^31 + 8 elements apart; only the touched memory exists."""
        problem = decode_problem([3, 4], attend.dtype, heads=1, spare=0)
        problem["cache"] = problem["cache"][problem["block_table"][:, 0]]
        problem["block_table"] = ints([0], [1])
        want, want_lse = attend(**problem)
        item, stride = attend.dtype.itemsize, 2**31 + 8
        try:
            memory = np.empty(stride + 1024, attend.dtype)
            far = {}
            for place, (name, shape) in enumerate(
                (("cache", (2, 4, E)), ("q", (2, 1, 1, E)), ("out", (2, 1, 1, L)))
            ):
                inner = np.zeros(shape, attend.dtype).strides[1:]
                strides = (stride * item, *inner)
                far[name] = np.ndarray(shape, attend.dtype, memory, 256 * place * item, strides)
                if name != "out":
                    far[name][...] = problem[name]
            _, lse = attend(**problem | far)
        except MemoryError as failure:
            pytest.skip(f"no room for the views: {failure}")
        same(far["out"].copy(), want)
        same(lse, want_lse)

    @decode
    @pytest.mark.parametrize("sparse", [False, True])
    def test_more_slots_than_32_bits_count(self, attend, sparse):
        """All blocks are one page of memory."""
        problem = decode_problem([3], attend.dtype, block_size=16, spare=0)
        block = int(problem["block_table"][0, 0])
        want = attend(**problem)
        page = problem["cache"][block]
        problem["cache"] = np.broadcast_to(page, (2**29, 16, E))
        problem["block_table"] = ints([2**29 - 1])
        if sparse:
            last = 2**31 - 16
            problem = with_indices(problem, [[[last, last + 1, last + 2]]])
        for got, other in zip(attend(**problem), want):
            close(got, other, attend.dtype)


GOOD = decode_problem([7, 3], tokens=2)
CODES = packed_rows("fp8_e4m3", np.ones((4, E), np.float32), TINY, 1.0)[0]
FP8 = {"cache": np.tile(CODES, (6, 1, 1)), "k_scale": 1.0, "cache_format": "fp8_e4m3"}
INT8 = {"cache": np.zeros((6, 4, FORMATS["int8_per_token"].row_bytes(TINY)), np.uint8)}
INT8["cache_format"] = "int8_per_token"
SPARSE = {**NO_BLOCKS, "indices": np.zeros((2, 2, 5), np.int32)}
TREE = np.zeros((2, 2, 1), np.int32)
ROOM = np.full(2000, POISON, np.float32)
LSE = (TINY.N, 4)
OUT = (2, 2, TINY.N, L)


def changed(name, change):
    return {name: change(GOOD[name])}


def shifted(start, shape):
    return ROOM[start : start + int(np.prod(shape))].reshape(shape)


@pytest.mark.parametrize(
    ("change", "error", "names"),
    [
        ({"q": None}, TypeError, "q is missing"),
        ({"q": [[[[1.0]]]]}, TypeError, "q"),
        (changed("q", lambda q: q[0]), ValueError, "q has shape"),
        (changed("q", lambda q: q.astype(np.float64)), TypeError, "q is float64"),
        (changed("q", lambda q: q.astype(bfloat16)), TypeError, "cache is float32"),
        (changed("q", lambda q: q[..., ::2]), ValueError, "q has a last axis"),
        (changed("q", lambda q: q[::-1]), ValueError, "q has strides"),
        (changed("q", lambda q: q[:, :, :0]), ValueError, "q has shape"),
        (changed("q", lambda q: q[..., :0]), ValueError, "q has shape"),
        (changed("q", lambda q: q[..., :44]), ValueError, "q has 44 columns"),
        (changed("q", lambda q: q[..., :39]), ValueError, "kv_lora_rank is 40"),
        ({"cache": None}, TypeError, "cache is missing"),
        (changed("cache", lambda c: c[0]), ValueError, "cache has shape"),
        (changed("cache", lambda c: c.astype(np.float64)), TypeError, "cache is float64"),
        (changed("cache", lambda c: c.astype(np.float16)), TypeError, "cache is float16"),
        (changed("cache", lambda c: c[..., ::2]), ValueError, "cache has a last axis"),
        (changed("cache", lambda c: c[::-1]), ValueError, "cache has strides"),
        (changed("cache", lambda c: c[:, :0]), ValueError, "cache has shape"),
        (changed("cache", lambda c: c[..., :0]), ValueError, "cache has shape"),
        (changed("cache", lambda c: c[..., :47]), ValueError, "cache has shape"),
        (changed("cache", lambda c: c[..., :32]), ValueError, "cache has shape"),
        ({"cache_format": "fp9"}, ValueError, "fp9"),
        ({"cache_format": "bfloat16"}, (TypeError, ValueError), "bfloat16"),
        ({"cache_format": "fp8_e4m3"}, (TypeError, ValueError), "fp8_e4m3"),
        ({"k_scale": 1.0}, ValueError, "k_scale is given"),
        ({**FP8, "k_scale": None}, ValueError, "k_scale is missing"),
        ({**FP8, "k_scale": 0.0}, ValueError, "k_scale is 0.0"),
        ({**FP8, "k_scale": -1.0}, ValueError, "k_scale is -1.0"),
        ({**FP8, "k_scale": np.nan}, ValueError, "k_scale is nan"),
        ({**FP8, "k_scale": 1e-45}, ValueError, "k_scale is 1"),
        ({**FP8, "k_scale": np.ones(2, np.float32)}, ValueError, "k_scale"),
        ({**FP8, "cache_format": None}, (TypeError, ValueError), "cache_format"),
        ({**FP8, "q_descale": 1.0}, ValueError, "q_descale is given, but q is float32"),
        ({**INT8, "k_scale": 1.0}, ValueError, "k_scale is given"),
        ({**INT8, "cache": INT8["cache"][..., :-1]}, ValueError, "cache has"),
        ({**FP8, "cache_format": "fp8_ds_mla", "k_scale": None}, ValueError, "cache has shape"),
        ({**FP8, "q": np.zeros((2, 2, TINY.N, E), np.uint8)}, ValueError, "q_descale is missing"),
        (
            {**FP8, "q": np.zeros((2, 2, TINY.N, E), np.uint8), "q_descale": -1.0},
            ValueError,
            "q_descale is -1.0",
        ),
        ({"kv_lora_rank": 0}, ValueError, "kv_lora_rank is 0"),
        ({"kv_lora_rank": 39}, ValueError, "kv_lora_rank 39"),
        ({"kv_lora_rank": 50}, ValueError, "kv_lora_rank is 50"),
        ({"kv_lora_rank": 40.0}, TypeError, "kv_lora_rank is float"),
        ({"kv_lora_rank": None}, TypeError, "kv_lora_rank is NoneType"),
        ({"block_table": None}, TypeError, "block_table is missing"),
        (changed("block_table", lambda t: t.astype(np.int64)), TypeError, "block_table is int64"),
        (changed("block_table", lambda t: t[0]), ValueError, "block_table has shape"),
        (changed("block_table", lambda t: t[:1]), ValueError, "block_table has shape"),
        (changed("block_table", lambda t: t[::-1]), ValueError, "block_table has strides"),
        (changed("block_table", lambda t: t[:, ::2]), ValueError, "block_table has a last axis"),
        (changed("block_table", lambda t: t[:, :1]), ValueError, "block_table has 1 columns"),
        ({"block_table": ints([0, 5, 0], [1, 0, 0])}, ValueError, "row 0 has an id beyond 4"),
        ({"seq_lens": None}, TypeError, "seq_lens is missing"),
        ({"seq_lens": ints(7, 3).astype(np.int64)}, TypeError, "seq_lens is int64"),
        ({"seq_lens": ints(7)}, ValueError, "seq_lens has shape"),
        ({"seq_lens": ints([7, 3])}, ValueError, "seq_lens has shape"),
        ({"seq_lens": ints(7, 0, 3, 0)[::2]}, ValueError, "seq_lens has a last axis"),
        ({"seq_lens": ints(7, -1)}, ValueError, r"seq_lens\[1\] is -1"),
        ({"seq_lens": ints(17, 1), "key_mass": None}, ValueError, "block_table has 4 columns"),
        ({"max_seq_len": 6}, ValueError, r"seq_lens\[0\] is 7, more than max_seq_len"),
        ({"max_seq_len": -1}, ValueError, "max_seq_len is -1"),
        ({"max_seq_len": 7.0}, TypeError, "max_seq_len is float"),
        ({"indices": SPARSE["indices"]}, ValueError, "block_table is given"),
        ({**SPARSE, "seq_lens": GOOD["seq_lens"]}, ValueError, "seq_lens is given"),
        ({**SPARSE, "tree_mask": TREE}, ValueError, "tree_mask is given"),
        ({**SPARSE, "window": 3}, ValueError, "window is given"),
        ({**SPARSE, "max_seq_len": 3}, ValueError, "max_seq_len is given"),
        ({**SPARSE, "indices": SPARSE["indices"][:1]}, ValueError, "indices has shape"),
        ({**SPARSE, "indices": SPARSE["indices"][:, :1]}, ValueError, "indices has shape"),
        ({**SPARSE, "indices": SPARSE["indices"][0]}, ValueError, "indices has shape"),
        ({**SPARSE, "indices": np.zeros((2, 2, 5), np.int64)}, TypeError, "indices is int64"),
        ({**SPARSE, "indices": SPARSE["indices"][..., ::2]}, ValueError, "indices has a last"),
        ({**SPARSE, "indices": np.full((2, 2, 5), 20, np.int32)}, ValueError, "slot 20"),
        ({**SPARSE, "key_mass": poisoned((2, 2, 4))}, ValueError, "key_mass has shape"),
        ({"tree_mask": TREE, "causal": False}, ValueError, "tree_mask is given, but causal"),
        ({"tree_mask": TREE.astype(np.int64)}, TypeError, "tree_mask is int64"),
        ({"tree_mask": TREE[..., 0]}, ValueError, "tree_mask has shape"),
        ({"tree_mask": TREE[:1]}, ValueError, "tree_mask has shape"),
        ({"tree_mask": np.zeros((2, 2, 2), np.int32)}, ValueError, "tree_mask has shape"),
        ({"window": 0}, ValueError, "window is 0"),
        ({"window": 1.5}, TypeError, "window is float"),
        ({"window": True}, TypeError, "window is bool"),
        ({"sink": np.zeros(TINY.N)}, TypeError, "sink is float64"),
        ({"sink": np.zeros(TINY.N + 1, np.float32)}, ValueError, "sink has shape"),
        ({"sink": np.zeros((1, TINY.N), np.float32)}, ValueError, "sink has shape"),
        ({"sink": np.zeros(2 * TINY.N, np.float32)[::2]}, ValueError, "sink has a last axis"),
        ({"sink": 0.5}, TypeError, "sink is float"),
        ({"num_splits": 0}, ValueError, "num_splits is 0"),
        ({"num_splits": 1.0}, TypeError, "num_splits is float"),
        ({"softmax_scale": 0.0}, ValueError, "softmax_scale is 0.0"),
        ({"softmax_scale": np.nan}, ValueError, "softmax_scale"),
        ({"softmax_scale": None}, TypeError, "softmax_scale is NoneType"),
        ({"causal": 1}, TypeError, "causal is int"),
        ({"deterministic": None}, TypeError, "deterministic is NoneType"),
        ({"return_key_mass": "yes"}, TypeError, "return_key_mass is str"),
        ({"return_lse": 0}, TypeError, "return_lse is int"),
        ({"return_lse": False}, ValueError, "out_lse is given"),
        ({"lse_base": "10"}, ValueError, "lse_base"),
        ({"lse_layout": "BSN"}, ValueError, "lse_layout"),
        ({"lse_layout": "TN"}, ValueError, "out_lse has shape"),
        ({"lse_layout": "BNS"}, ValueError, "out_lse has shape"),
        ({"out_dtype": "float64"}, TypeError, "out_dtype"),
        ({"out_dtype": "bfloat16"}, TypeError, "out is float32, expected bfloat16"),
        ({"out": poisoned(OUT, np.float64)}, TypeError, "out is float64"),
        ({"out": poisoned(OUT[1:])}, ValueError, "out has shape"),
        ({"out": poisoned((2, 2, TINY.N, E))}, ValueError, "out has shape"),
        ({"out": poisoned((2, 2, TINY.N, 2 * L))[..., ::2]}, ValueError, "out has a last axis"),
        ({"out": poisoned(OUT)[:, ::-1]}, ValueError, "out has strides"),
        ({"out": np.broadcast_to(np.float32(POISON), OUT)}, ValueError, "out"),
        ({"out": as_strided(ROOM, OUT, (960, 80, 160, 4))}, ValueError, "out has strides"),
        ({"out_lse": poisoned((4, TINY.N))}, ValueError, "out_lse has shape"),
        ({"out_lse": poisoned(LSE, bfloat16)}, TypeError, "out_lse is bfloat16"),
        ({"out_lse": poisoned(LSE)[::-1]}, ValueError, "out_lse has strides"),
        ({"key_mass": poisoned((2, 2, 6))}, ValueError, "key_mass has 6 keys"),
        ({"key_mass": poisoned((2, 3, 9))}, ValueError, "key_mass has shape"),
        ({"key_mass": poisoned((2, 9))}, ValueError, "key_mass has shape"),
        ({"key_mass": poisoned((2, 2, 9), np.float64)}, TypeError, "key_mass is float64"),
        ({"key_mass": poisoned((2, 2, 18))[..., ::2]}, ValueError, "key_mass has a last axis"),
        ({"out": GOOD["q"][..., :L]}, ValueError, "out shares memory with q"),
        ({"out": GOOD["cache"].reshape(-1)[:480].reshape(OUT)}, ValueError, "out shares.*cache"),
        ({"out_lse": GOOD["q"].reshape(-1)[:12].reshape(LSE)}, ValueError, "out_lse shares"),
        ({"key_mass": GOOD["q"].reshape(-1)[:36].reshape(2, 2, 9)}, ValueError, "key_mass shares"),
        (
            {"sink": ROOM[:3], "out_lse": shifted(2, LSE)},
            ValueError,
            "out_lse shares memory with sink",
        ),
        (
            {"out": shifted(0, OUT), "out_lse": shifted(479, LSE)},
            ValueError,
            "out shares memory with out_lse",
        ),
        (
            {"out": shifted(0, OUT), "key_mass": shifted(479, (2, 2, 9))},
            ValueError,
            "out shares memory with key_mass",
        ),
        ({"variant": "no such"}, ValueError, "no such"),
    ],
)
def test_bad_input_is_refused_by_name_and_nothing_is_written(change, error, names):
    given = {"out": poisoned(OUT), "out_lse": poisoned(LSE), "key_mass": poisoned((2, 2, 9))}
    if "indices" in change and "key_mass" not in change:
        given["key_mass"] = poisoned((2, 2, 5))
    arguments = {**GOOD, **given, **change}
    arrays = {name: value for name, value in arguments.items() if isinstance(value, np.ndarray)}
    before = {name: array.copy() for name, array in arrays.items()}
    with pytest.raises(error, match=names):
        decode_attention(**arguments)
    for name, array in arrays.items():
        np.testing.assert_array_equal(bits_of(array), bits_of(before[name]), err_msg=name)


class TestTorch:
    @pytest.fixture
    def torch(self):
        return pytest.importorskip("torch")

    @fast_decode
    @pytest.mark.parametrize("name", ["float32", "bfloat16"])
    def test_tensors_give_the_results_of_arrays(self, torch, attend, name):
        if attend.target == "gpu":
            pytest.skip("tensors of this test are on the CPU")
        problem = decode_problem([9, 0, 5], DTYPES[name], tokens=2) | {"return_key_mass": True}
        problem |= {"sink": np.zeros(TINY.N, np.float32)}
        want = attend(**problem)
        tensors = {
            key: torch.from_numpy(value.astype(np.float32)).to(getattr(torch, name))
            if key in ("q", "cache")
            else torch.from_numpy(value)
            for key, value in problem.items()
            if isinstance(value, np.ndarray)
        }
        tensors["cache"] = torch.nn.Parameter(tensors["cache"])
        found = attend(**problem | tensors)
        assert [each.dtype for each in found] == [getattr(torch, name), *2 * [torch.float32]]
        for got, other in zip(found, want):
            np.testing.assert_array_equal(got.float().numpy(), other.astype(np.float32))
        wide = torch.full((3, 2, TINY.N, L + 8), POISON, dtype=getattr(torch, name))
        given = wide[..., :L]
        out, _, mass = attend(**problem | tensors, out=given)
        assert out is given
        assert torch.equal(wide[..., :L], found[0])
        assert (wide[..., L:] == POISON).all()
        assert torch.equal(mass, found[2])

    def test_codes_of_torch(self, torch):
        problem = decode_problem([9])
        rows = np.random.default_rng(0).standard_normal((9, E), np.float32)
        pages = paged([rows], 4)
        codes = torch.from_numpy(np.nan_to_num(pages["cache"])).to(torch.float8_e4m3fn)
        said = {"cache_format": "fp8_e4m3", "k_scale": torch.tensor(0.5)}
        out, lse = decode_attention(**problem | pages | said | {"cache": codes})
        values = codes.float().numpy() * np.float32(0.5)
        want, want_lse = decode_attention(**problem | pages | {"cache": values})
        np.testing.assert_array_equal(out, want)
        np.testing.assert_array_equal(lse, want_lse)
