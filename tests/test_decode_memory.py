"""Strides, layouts, offsets beyond 32 bits, and what the checked build says of accesses."""

import numpy as np
import pytest
from attention_problems import (
    TINY,
    close,
    decode,
    decode_problem,
    decode_reference,
    fast_decode,
    host_decode,
    ints,
    packed_rows,
    paged,
    poisoned,
    same,
    with_indices,
)

from sandbox.arrays import bfloat16
from sandbox.cache_formats import FORMATS, Widths
from sandbox.kernels.cuda import host_options

L, E = TINY.L, TINY.E
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
        for got, want in zip(found, decode_reference(**problem)):
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
