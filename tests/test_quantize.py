"""Quantized outputs: exact codes, exact scales, and what becomes of what is no number."""

import ml_dtypes
import numpy as np
import pytest
from quantize_oracles import (
    EDGES,
    F32,
    INF,
    NAN,
    all_bfloat16,
    e4m3,
    expected_groups,
    expected_nvfp4,
    groups,
    nearest_e2m1,
    nvfp4,
    same,
    static,
    unpacked,
    values,
)

from sandbox.arrays import bfloat16
from sandbox.kernels import Unavailable, cuda, quantize_groups, quantize_nvfp4, quantize_static
from sandbox.kernels.quantize import e2m1


@pytest.fixture(autouse=True)
def checked():
    """The builds that the conformance tests have."""
    with cuda.host_options(checked=True):
        yield


class TestE2M1:
    def test_every_bfloat16(self):
        numbers = all_bfloat16().astype(np.float32)
        same(e2m1.encode(numbers), nearest_e2m1(numbers))

    def test_numbers_around_every_tie(self):
        around = [np.nextafter(e2m1.TIES, F32(end)) for end in (-9, 9)]
        numbers = np.concatenate([e2m1.TIES, *around])
        numbers = np.concatenate([numbers, -numbers])
        same(e2m1.encode(numbers), nearest_e2m1(numbers))
        assert e2m1.encode(e2m1.TIES).tolist() == [0, 2, 2, 4, 4, 6, 6]

    def test_codes_are_those_of_the_format(self):
        codes = np.arange(16, dtype=np.uint8)
        same(e2m1.decode(codes), codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32))
        same(e2m1.encode(e2m1.decode(codes)), codes)

    def test_the_first_of_two_is_in_the_low_bits(self):
        codes = np.array([[1, 2, 15, 8]], np.uint8)
        assert e2m1.pack(codes).tolist() == [[0x21, 0x8F]]
        same(e2m1.unpack(e2m1.pack(codes)), codes)


@static
class TestStatic:
    @pytest.mark.parametrize("dtype", [np.float32, np.float16, bfloat16])
    @pytest.mark.parametrize("scale", [1.0, 0.3, 3.7])
    def test_codes_are_those_of_the_format(self, variant, dtype, scale):
        x = values((4, 48), dtype)
        with np.errstate(over="ignore"):
            x[1, : len(EDGES)] = (np.array(EDGES, np.float32) * F32(scale)).astype(dtype)
        out = quantize_static(x, scale, variant=variant)
        with np.errstate(invalid="ignore"):
            same(out, e4m3(x.astype(np.float32) * (F32(1) / F32(scale))))
        assert out[1, 5:9].tolist() == [0x7E, 0xFE, 0x7F, 0x7F]

    def test_are_of_the_reciprocal_and_not_of_the_quotient(self, variant):
        """Ties of E4M3 times a descale, where the two ways round differently."""
        scale = F32(3.7)
        ties = (np.arange(8, 16, dtype=np.float32) + F32(0.5)) / 64 * scale
        x = np.concatenate([ties, np.nextafter(ties, F32(9))])[None]
        assert (e4m3(x / scale) != e4m3(x * (F32(1) / scale))).sum() >= 3
        same(quantize_static(x, scale, variant=variant), e4m3(x * (F32(1) / scale)))

    def test_a_scale_is_read_at_each_call(self, variant):
        x, scale = values((3, 48), bfloat16), np.array([0.5], np.float32)
        first = quantize_static(x, scale, variant=variant)
        scale[0] = 0.01
        second = quantize_static(x, scale, variant=variant)
        same(second, quantize_static(x, 0.01, variant=variant))
        assert (first != second).any()

    @pytest.mark.parametrize("shape", [(0, 5), (1, 1), (2, 51), (3, 4120)])
    def test_of_any_shape_and_into_wider_rows(self, variant, shape):
        x = values((shape[0], shape[1] + 4), bfloat16)[:, 1 : 1 + shape[1]]
        wide = np.full((shape[0], shape[1] + 3), 9, np.uint8)
        out = quantize_static(x, 0.37, out=wide[:, 2:-1], variant=variant)
        assert out.shape == shape
        same(out, e4m3(x.astype(np.float32) * (F32(1) / F32(0.37))))
        assert (wide[:, :2] == 9).all()
        assert (wide[:, -1] == 9).all()


@groups
class TestGroups:
    @pytest.mark.parametrize("pow2", [False, True])
    @pytest.mark.parametrize(
        ("dtype", "size"), [(np.float32, 24), (np.float16, 16), (bfloat16, 16)]
    )
    def test_codes_and_scales_are_exact(self, variant, dtype, size, pow2):
        x = values((7, 48), dtype)
        x[2, :20], x[3] = NAN, 0
        form = "ue8m0" if pow2 else "float32"
        out, scales = quantize_groups(x, group_size=size, scale_format=form, variant=variant)
        want, want_scales = expected_groups(x, size, pow2)
        same(out, want)
        same(scales, want_scales)

    def test_are_of_the_quotient_and_not_of_the_reciprocal(self, variant):
        x = np.zeros((60, 24), np.float32)
        x[:, 0] = np.linspace(3, 40, 60)  # amax
        scales = x[:, :1] / F32(448)
        x[:, 1:] = (np.arange(23, dtype=np.float32) + F32(8.5)) * scales
        assert (e4m3(x / scales) != e4m3(x * (F32(1) / scales))).sum() >= 10
        out, _ = quantize_groups(x, group_size=24, variant=variant)
        same(out, e4m3(x / scales))

    def test_scales_that_are_powers_of_two(self, variant):
        exact = F32(448) * np.exp2(np.array([-30, -3, 0, 7, 100], np.float32))
        amax = np.concatenate([exact, np.nextafter(exact, F32(0)), np.nextafter(exact, F32(INF))])
        x = np.repeat(amax[:, None], 24, axis=1)
        _, scales = quantize_groups(x, group_size=24, scale_format="ue8m0", variant=variant)
        powers = exact / F32(448)
        same(scales[:, 0], np.concatenate([powers, powers, 2 * powers]))
        assert not (scales.view(np.uint32) & 0x7FFFFF).any()

    def test_the_least_scale(self, variant):
        x = np.array([[0.0], [9e-11], [2e-10]], np.float32).repeat(24, axis=1)
        out, scales = quantize_groups(x, group_size=24, variant=variant)
        least = F32(1e-10) / F32(448)
        same(scales[:, 0], [least, least, F32(2e-10) / F32(448)])
        assert out[:, 0].tolist() == [0, int(e4m3(F32(9e-11) / least)), 0x7E]
        _, scales = quantize_groups(x, group_size=24, scale_format="ue8m0", variant=variant)
        same(scales[:2, 0], [2.0**-42, 2.0**-42])

    @pytest.mark.parametrize("wrong", [INF, -INF, NAN, -NAN])
    def test_what_is_no_finite_number_changes_nothing_else(self, variant, wrong):
        x = values((3, 48), bfloat16)
        clean = quantize_groups(x * (np.arange(48) != 5), group_size=16, variant=variant)
        x[:, 5] = wrong
        out, scales = quantize_groups(x, group_size=16, variant=variant)
        same(scales, clean[1])
        same(np.delete(out, 5, axis=1), np.delete(clean[0], 5, axis=1))
        assert (out[:, 5] == (0x7F if np.isnan(wrong) else 0x7E if wrong > 0 else 0xFE)).all()

    @pytest.mark.parametrize("size", [8, 64, 520, 1024])
    def test_groups_of_many_sizes_and_odd_addresses(self, variant, size):
        x = values((2, 2 * size + 1), bfloat16)[:, 1:]
        out, scales = quantize_groups(x, group_size=size, variant=variant)
        want, want_scales = expected_groups(x, size)
        same(out, want)
        same(scales, want_scales)

    @pytest.mark.parametrize("tokens", [0, 1, 4, 5])
    def test_columns_of_scales_are_aligned(self, variant, tokens):
        x = values((tokens, 48), bfloat16)
        plain = quantize_groups(x, group_size=16, variant=variant)
        out, scales = quantize_groups(x, group_size=16, scale_layout="column", variant=variant)
        same(out, plain[0])
        same(scales, plain[1])
        assert scales.shape == (tokens, 3)
        assert plain[1].flags.c_contiguous
        if tokens:
            assert scales.strides == (4, 4 * (-(-tokens // 4) * 4))

    def test_scales_go_where_the_caller_says(self, variant):
        x, memory = values((5, 48), bfloat16), np.full((6, 11), 7, np.float32)
        mine = memory[::2, 1:].T[::2]
        for layout in ("row", "column"):
            _, scales = quantize_groups(
                x, group_size=16, scale_layout=layout, out_scales=mine, variant=variant
            )
            assert scales is mine
            same(scales, expected_groups(x, 16)[1])
            mine[...] = 7
        assert (memory == 7).all()


@nvfp4
class TestNvfp4:
    @pytest.mark.parametrize("dtype", [np.float32, np.float16, bfloat16])
    @pytest.mark.parametrize("global_scale", [1.0, 0.0123, 1e-5, 1e-37, 3e36])
    def test_codes_and_scales_are_exact(self, variant, dtype, global_scale):
        x = values((24, 48), dtype) * np.array(min(global_scale, 10), dtype)
        x[2, :20], x[3], x[4, 3], x[5, 7] = NAN, 0, INF, -INF
        out, scales = quantize_nvfp4(x, global_scale, variant=variant)
        want, want_scales = expected_nvfp4(x, global_scale)
        same(unpacked(out), want)
        same(scales, want_scales)

    def test_every_bfloat16(self, variant):
        """In blocks whose scale has saturated, so that each value is divided by 1."""
        step = F32(1) / F32(448)
        numbers = all_bfloat16()[:: 16 if variant == "numba_scalar" else 1]
        x = np.full((-(-len(numbers) // 45), 3, 16), 6, bfloat16)
        x[:, :, 1:] = np.resize(numbers, x[:, :, 1:].shape)
        x = x.reshape(len(x), 48)
        out, scales = quantize_nvfp4(x, step, variant=variant)
        assert (scales == 0x7E).all()
        assert F32(448) * step == 1
        same(unpacked(out), nearest_e2m1(x.astype(np.float32)))

    def test_quotients_at_ties(self, variant):
        """Steps of which no multiple is a float: what is near a tie must round as the quotient."""
        global_scale = F32(0.0123)
        blocks = np.outer(np.float32([1, 1.25, 13, 208]), [6, *e2m1.TIES, *-e2m1.TIES, 4])
        x = (blocks.astype(np.float32) * global_scale)[:, :16]
        x = np.concatenate([x, np.nextafter(x, F32(0)), np.nextafter(x, 2 * x)], axis=1)
        out, scales = quantize_nvfp4(x, global_scale, variant=variant)
        want, want_scales = expected_nvfp4(x, global_scale)
        same(unpacked(out), want)
        same(scales, want_scales)

    def test_a_block_scale_of_0_gives_codes_0(self, variant):
        x = np.full((1, 48), -6 * 2.0**-10, np.float32)
        x[0, 16:32] = -6 * 1.01 * 2.0**-10
        x[0, 32:], x[0, 40] = 0, -INF
        out, scales = quantize_nvfp4(x, 1.0, variant=variant)
        assert scales.tolist() == [[0, 1, 0]]  # the first one is a tie
        assert not unpacked(out)[0, [*range(16), *range(32, 48)]].any()
        assert (unpacked(out)[0, 16:32] == 0xD).all()  # -3

    def test_a_global_scale_that_is_too_small_saturates(self, variant):
        for size, global_scale in (2.0**30, 1e-5), (2.0**110, 1e-30):
            x = values((2, 48), bfloat16) * np.array(size, bfloat16)
            out, scales = quantize_nvfp4(x, global_scale, variant=variant)
            assert (scales == 0x7E).all()
            same(unpacked(out), np.where(x < 0, 0xF, 7))

    def test_odd_addresses(self, variant):
        x, wide = values((3, 49), bfloat16)[:, 1:], np.full((3, 27), 9, np.uint8)
        out, scales = quantize_nvfp4(x, 0.02, out=wide[:, 1:25], variant=variant)
        want, want_scales = expected_nvfp4(x, 0.02)
        same(unpacked(out), want)
        same(scales, want_scales)
        assert (wide[:, [0, 25, 26]] == 9).all()


def test_rows_of_no_whole_pairs_are_refused_by_the_vector_kernel():
    x = values((3, 49), bfloat16)[:, 1:]
    with pytest.raises(Unavailable, match="pairs"):
        quantize_nvfp4(x, 0.02, variant="raw_vector")
