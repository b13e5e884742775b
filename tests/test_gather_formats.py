"""Packed rows restored to numbers, by gather and by dequantize_context: field cases, every code,
scales, widths, refusals."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided
from variants_here import all_here, here

from sandbox.arrays import bfloat16
from sandbox.cache_formats import E4M3, E5M2, FORMATS, Widths
from sandbox.kernels import concat_insert, cuda, dequantize_context, gather
from sandbox.kernels.op import Unavailable

VALUES = [np.dtype(np.float32), np.dtype(np.float16), bfloat16]
PACKED = [fmt for fmt in FORMATS.values() if fmt.packed]


@pytest.fixture(autouse=True)
def checked():
    """The host runner's checked build, whose kernels the conformance suite compiles too."""
    with cuda.host_options(checked=True):
        yield


GATHER = pytest.mark.parametrize("variant", here(gather, but=["raw_bulk"]))
PAIRS = all_here(gather, dequantize_context, but=["raw_bulk"])
BOTH = pytest.mark.parametrize(("op", "variant"), PAIRS)
EVERY_FORMAT = pytest.mark.parametrize("fmt", PACKED, ids=lambda fmt: fmt.name)


def ints(*values):
    return np.array(values, dtype=np.int32)


def restore(op, rows, fmt, L=None, **options):
    """Rows `[T, bytes]` through either op, for gather as the pages of a cache."""
    options = {"cache_format": fmt.name, "kv_lora_rank": L, **options}
    if op is dequantize_context:
        return op(rows, **options)
    table = np.arange(len(rows), dtype=np.int32)[None]
    return op(rows[:, None], table, ints(0, len(rows)), **options)


def scale_of(fmt, value=0.37):
    return {"k_scale": value} if fmt.needs_scale else {}


def widths_of(fmt):
    """As in the conformance cases."""
    return Widths(256 if fmt.tile_scales else 40, 8)


def random_rows(fmt, widths, count, seed=0):
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((count, widths.L + widths.R), dtype=np.float32)
    return fmt.encode(values, widths, **scale_of(fmt))


def bits(array):
    """NaNs all alike."""
    same = np.where(np.isnan(array.astype(np.float32)), np.array(np.nan, array.dtype), array)
    return np.ascontiguousarray(same).view(f"u{array.dtype.itemsize}")


@BOTH
class TestValues:
    @pytest.mark.parametrize("dtype", VALUES, ids=lambda dtype: dtype.name)
    def test_latent_and_rope_are_both_scaled(self, op, variant, dtype):
        rows = np.full((1, 48), 0x48, np.uint8)
        fmt = FORMATS["fp8_e4m3"]
        out = restore(op, rows, fmt, k_scale=0.5, out_dtype=dtype, variant=variant)
        assert out.dtype == dtype
        assert out.shape == (1, 48)
        assert (out == 2).all()

    def test_scales_of_tiles_are_any_float32(self, op, variant):
        fmt, widths = FORMATS["fp8_ds_mla"], Widths(256, 8)
        values = np.zeros((2, 264), np.float32)
        values[0, [3, 256, 263]] = 336, 1.5, -2
        raw = fmt.encode(values, widths, tile_scale="raw")
        assert raw[0, 256:260].view(np.float32) == 0.75
        out = restore(op, raw, fmt, 256, out_dtype="float32", variant=variant)
        np.testing.assert_array_equal(out, values)
        scales = np.array([[0.75, 1e-40], [-1.2345e10, np.inf]], np.float32)
        raw[:, :256], raw[:, 256:264] = 0x39, scales.view(np.uint8)
        out = restore(op, raw, fmt, 256, out_dtype="float32", variant=variant)
        np.testing.assert_array_equal(out[:, :256:128], np.float32(1.125) * scales)
        np.testing.assert_array_equal(out[0, 256:], [1.5, 0, 0, 0, 0, 0, 0, -2])

    @pytest.mark.parametrize("dtype", VALUES, ids=lambda dtype: dtype.name)
    @EVERY_FORMAT
    def test_every_code(self, op, variant, fmt, dtype):
        widths = widths_of(fmt)
        code_bytes = sum(f.nbytes for f in fmt.layout(widths) if f.dtype.itemsize == 1)
        rows = np.full((-(-256 // code_bytes), fmt.row_bytes(widths)), 0x3F, np.uint8)
        codes = np.arange(len(rows) * code_bytes).astype(np.uint8).reshape(len(rows), code_bytes)
        rows[:, :code_bytes] = codes
        scale = np.float32(0.37) if fmt.needs_scale else np.uint32(0x3F3F3F3F).view(np.float32)
        if fmt.name == "int4_per_token":
            nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(rows), -1)
            numbers = (nibbles.astype(np.int32) ^ 8) - 8
        else:
            kind = {"int8_per_token": np.int8, "fp8_e5m2": E5M2.dtype}.get(fmt.name, E4M3.dtype)
            numbers = codes.view(kind)
        with np.errstate(all="ignore"):
            expected = (numbers.astype(np.float32) * scale).astype(dtype)
        out = restore(op, rows, fmt, widths.L, out_dtype=dtype, variant=variant, **scale_of(fmt))
        np.testing.assert_array_equal(bits(out[:, : expected.shape[1]]), bits(expected))

    def test_the_low_nibble_comes_first(self, op, variant):
        fmt, row = FORMATS["int4_per_token"], np.zeros((1, 32), np.uint8)
        row[0, [0, 19, 20, 23]] = 0x21, 0x8F, 0x70, 0x0C
        row[0, 24:] = np.array([2, 0.5], np.float32).view(np.uint8)
        out = restore(op, row, fmt, 40, out_dtype="float32", variant=variant)[0]
        assert out[[0, 1, 38, 39]].tolist() == [2, 4, -2, -16]
        assert out[[40, 41, 46, 47]].tolist() == [0, 3.5, -2, 0]

    def test_float16_overflows_to_infinity(self, op, variant):
        rows = np.tile(np.array([0x7E, 0xFE, 0x38, 0x00], np.uint8), (1, 12))
        fmt = FORMATS["fp8_e4m3"]
        out = restore(op, rows, fmt, k_scale=200.0, out_dtype=np.float16, variant=variant)
        assert out[0, :4].tolist() == [np.inf, -np.inf, 200, 0]

    @EVERY_FORMAT
    def test_no_tokens(self, op, variant, fmt):
        widths = widths_of(fmt)
        rows = np.zeros((0, fmt.row_bytes(widths)), np.uint8)
        out = restore(op, rows, fmt, widths.L, variant=variant, **scale_of(fmt))
        assert out.shape == (0, widths.L + widths.R)
        assert out.dtype == bfloat16

    def test_rows_of_codes_may_start_at_any_byte(self, op, variant):
        fmt, widths = FORMATS["fp8_e4m3"], Widths(48, 0)
        rows = random_rows(fmt, widths, 3)
        memory = np.zeros(3 * 49 + 1, np.uint8)
        odd = as_strided(memory[1:], (3, 48), (49, 1))
        odd[...] = rows
        out = restore(op, odd, fmt, variant=variant, **scale_of(fmt))
        np.testing.assert_array_equal(out, fmt.decode(rows, widths, k_scale=0.37).astype(bfloat16))

    @pytest.mark.parametrize("name", ["fp8_ds_mla", "int4_per_token"])
    def test_out_that_starts_at_any_element(self, op, variant, name):
        fmt, widths = FORMATS[name], widths_of(FORMATS[name])
        rows = random_rows(fmt, widths, 3)
        wide = np.full((3, widths.L + widths.R + 3), -1, bfloat16)
        out = wide[:, 1:-2]
        call = {"out": out, "variant": variant, **scale_of(fmt)}
        if fmt.name == "int4_per_token" and variant in (
            "raw_tile",
            "raw_warp",
            "raw_vector",
            "raw_unfused",
        ):
            with pytest.raises(Unavailable, match="two codes share a byte"):
                restore(op, rows, fmt, widths.L, **call)
            return
        restore(op, rows, fmt, widths.L, **call)
        expected = fmt.decode(rows, widths, **scale_of(fmt)).astype(bfloat16)
        np.testing.assert_array_equal(out, expected)
        assert (wide[:, [0, -2, -1]] == -1).all()

    def test_offsets_beyond_32_bits(self, op, variant):
        fmt, widths, far = FORMATS["int8_per_token"], Widths(40, 8), 2**31 + 128
        rows = random_rows(fmt, widths, 2)
        apart = as_strided(np.zeros(far + 56, np.uint8), (2, 56), (far, 1))
        apart[...] = rows
        out = as_strided(np.zeros(far // 4 + 48, np.float32), (2, 48), (far, 4))
        with cuda.host_options(checked=False):  # which notes down every byte
            restore(op, apart, fmt, 40, out=out, variant=variant)
        np.testing.assert_array_equal(out, fmt.decode(rows, widths))


@settings(max_examples=24, deadline=None, database=None, derandomize=True)
@given(
    which=st.sampled_from([each.values for each in PAIRS if not each.marks]),
    fmt=st.sampled_from(PACKED),
    latent=st.integers(1, 9),
    rope=st.integers(0, 4),
    dtype=st.sampled_from(VALUES),
    padding=st.sampled_from([0, 4, 12]),
)
def test_any_widths(which, fmt, latent, rope, dtype, padding):
    op, variant = which
    widths = Widths(latent * {"fp8_ds_mla": 128, "int4_per_token": 8}.get(fmt.name, 4), 8 * rope)
    if fmt.needs_scale:
        widths = Widths(widths.L + latent, 2 * rope)
    rows = random_rows(fmt, widths, 3, seed=latent)
    padded = np.full((3, rows.shape[1] + padding), 0xFF, np.uint8)[:, : rows.shape[1]]
    padded[...] = rows
    with cuda.host_options(checked=False):
        out = restore(op, padded, fmt, widths.L, out_dtype=dtype, variant=variant, **scale_of(fmt))
    expected = fmt.decode(rows, widths, **scale_of(fmt)).astype(dtype)
    np.testing.assert_array_equal(bits(out), bits(expected))


@GATHER
class TestGather:
    @EVERY_FORMAT
    def test_rows_without_a_page_are_zeros_and_others_are_left(self, variant, fmt):
        widths = widths_of(fmt)
        rows = random_rows(fmt, widths, 4)
        out = np.full((9, widths.L + widths.R), 7, np.float32)
        gather(
            rows.reshape(2, 2, -1),
            np.array([[1, -1], [2, 0]], np.int32),
            ints(1, 5, 8),
            seq_starts=ints(0, 1),
            out=out,
            cache_format=fmt.name,
            kv_lora_rank=widths.L,
            variant=variant,
            check_values=False,
            **scale_of(fmt),
        )
        values = fmt.decode(rows, widths, **scale_of(fmt))
        np.testing.assert_array_equal(out[[1, 2, 6, 7]], values[[2, 3, 0, 1]])
        assert (out[3:6] == 0).all()
        assert (out[[0, 8]] == 7).all()

    @EVERY_FORMAT
    def test_codes_gathered_and_restored_later_are_the_same(self, variant, fmt):
        widths = widths_of(fmt)
        cache = random_rows(fmt, widths, 12).reshape(4, 3, -1)
        call = {
            "cache": cache,
            "block_table": np.array([[3, 0], [2, 1]], np.int32),
            "cu_seq_lens": ints(0, 5, 9),
            "seq_starts": ints(1, 0),
            "cache_format": fmt.name,
            "variant": variant,
        }
        how = {"kv_lora_rank": widths.L, **scale_of(fmt)}
        restored = gather(**call, **how)
        try:
            codes = gather(**call, out_dtype="uint8")
        except Unavailable:  # it restores only
            codes = gather(**{**call, "variant": "auto"}, out_dtype=np.uint8)
        np.testing.assert_array_equal(
            codes, cache[[3, 3, 0, 0, 0, 2, 2, 2, 1], [1, 2, 0, 1, 2, 0, 1, 2, 0]]
        )
        later = dequantize_context(codes, cache_format=fmt.name, **how)
        np.testing.assert_array_equal(restored.view(np.uint16), later.view(np.uint16))

    def test_codes_are_copied_without_a_format(self, variant):
        if variant == "raw_unfused":
            pytest.skip("restores only")
        cache = np.arange(48, dtype=np.uint8).reshape(4, 1, 12)
        out = np.zeros((2, 12), np.uint8)
        gather(cache, np.array([[2, 0]], np.int32), ints(0, 2), out=out, variant=variant)
        np.testing.assert_array_equal(out, cache[[2, 0], 0])


@BOTH
def test_scales_of_every_kind_are_the_same(op, variant):
    torch = pytest.importorskip("torch")
    fmt, rows = FORMATS["fp8_e4m3"], np.arange(0, 48, dtype=np.uint8).reshape(1, 48)
    expected = (E4M3.decode(rows) * np.float32(0.37)).astype(bfloat16)
    for scale in (
        0.37,
        np.float64(0.37),
        np.float32(0.37),
        np.array(0.37),
        np.array([0.37], np.float32),
        torch.tensor(0.37),
        torch.tensor([0.37], dtype=torch.float64),
    ):
        out = restore(op, rows, fmt, k_scale=scale, variant=variant)
        np.testing.assert_array_equal(np.asarray(out), expected)


@BOTH
def test_torch_tensors_of_8_bit_floats(op, variant):
    torch = pytest.importorskip("torch")
    rows = torch.arange(0, 48, dtype=torch.uint8).view(1, 48)
    floats = rows.view(torch.float8_e4m3fn)
    if op is gather:
        floats = floats[:, None]
        call = {"block_table": torch.tensor([[0]], dtype=torch.int32)}
        call["cu_seq_lens"] = torch.tensor([0, 1], dtype=torch.int32)
    else:
        call = {}
    out = op(floats, **call, cache_format="fp8_e4m3", k_scale=torch.tensor(0.5), variant=variant)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, (rows.view(torch.float8_e4m3fn).float() * 0.5).bfloat16())


def test_another_8_bit_float_is_no_cache_of_the_format():
    torch = pytest.importorskip("torch")
    rows = torch.zeros(1, 1, 48, dtype=torch.uint8)
    table, bounds = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    scale = {"k_scale": 0.5}
    values, slots = torch.ones(1, 40), torch.zeros(1, dtype=torch.int64)
    for name, dtype in (("fp8_e4m3", "float8_e5m2"), ("fp8_e5m2", "float8_e4m3fn"),
                        ("fp8_e4m3", "float8_e4m3fnuz")):  # fmt: skip
        cache = rows.view(getattr(torch, dtype))
        with pytest.raises(TypeError, match=f"cache is {dtype}, but {name} is"):
            gather(cache, table, bounds, cache_format=name, **scale)
        with pytest.raises(TypeError, match=f"codes is {dtype}, but {name} is"):
            dequantize_context(cache[0], cache_format=name, **scale)
        with pytest.raises(TypeError, match=f"cache is {dtype}, but {name} is"):
            concat_insert(values, torch.ones(1, 8), cache, slots, cache_format=name, **scale)


DS_MLA = np.zeros((3, 156 + 16), np.uint8)
"""L = 128, R = 20."""


@pytest.mark.parametrize("op", [gather, dequantize_context], ids=lambda op: op.name)
class TestRefusals:
    @pytest.mark.parametrize(
        ("fmt", "options", "error", "names"),
        [
            ("fp8_e4m3", {}, ValueError, "k_scale is missing"),
            ("fp8_e5m2", {"k_scale": None}, ValueError, "k_scale is missing"),
            ("fp8_e4m3", {"k_scale": 0.0}, ValueError, "k_scale is 0"),
            ("fp8_e4m3", {"k_scale": -1.0}, ValueError, "k_scale is -1"),
            ("fp8_e4m3", {"k_scale": np.nan}, ValueError, "k_scale is nan"),
            ("fp8_e4m3", {"k_scale": np.inf}, ValueError, "k_scale is inf"),
            ("fp8_e4m3", {"k_scale": "1"}, TypeError, "k_scale"),
            ("fp8_e4m3", {"k_scale": np.ones(2, np.float32)}, ValueError, "k_scale"),
            ("fp8_e4m3", {"k_scale": 1.0, "out_dtype": np.float64}, TypeError, "out_dtype"),
            ("fp8_e4m3", {"k_scale": 1.0, "out_dtype": "float32"}, TypeError, "out is"),
            ("fp8_ds_mla", {"kv_lora_rank": 128, "k_scale": 1.0}, ValueError, "k_scale is given"),
            ("fp8_ds_mla", {}, ValueError, "kv_lora_rank is missing"),
            ("fp8_ds_mla", {"kv_lora_rank": 256}, ValueError, "172 elements are no fp8_ds_mla"),
            ("fp8_ds_mla", {"kv_lora_rank": 100}, ValueError, "multiple of 128"),
            ("fp8_ds_mla", {"kv_lora_rank": 128.0}, TypeError, "kv_lora_rank"),
            ("int8_per_token", {"kv_lora_rank": 161}, ValueError, "no int8_per_token rows"),
            ("int4_per_token", {"kv_lora_rank": 400}, ValueError, "no int4_per_token rows"),
            ("nvfp4", {}, ValueError, "cache_format"),
            ("bfloat16", {}, (TypeError, ValueError), "bfloat16"),
            (3, {}, TypeError, "cache_format"),
        ],
    )
    def test_bad_formats_and_scales(self, op, fmt, options, error, names):
        out = np.full((3, 172), 7, bfloat16)
        call = {"cache_format": fmt, "out": out[:, : 148 if fmt == "fp8_ds_mla" else 172]}
        with pytest.raises(error, match=names):
            self.call(op, DS_MLA, **call, **options)
        assert (out == 7).all()

    def call(self, op, rows, **options):
        if op is dequantize_context:
            return op(rows, **options)
        return op(rows[:, None], ints(0, 1, 2)[None], ints(0, 3), **options)

    @pytest.mark.parametrize("width", [171, 173, 174])
    def test_rows_of_another_size(self, op, width):
        rows = np.zeros((3, 176), np.uint8)[:, :width]
        with pytest.raises(ValueError, match=rf"{width} elements are no fp8_ds_mla rows"):
            self.call(op, rows, cache_format="fp8_ds_mla", kv_lora_rank=128)

    @pytest.mark.parametrize("fmt", ["fp8_ds_mla", "int8_per_token", "int4_per_token"])
    @pytest.mark.parametrize(("start", "stride"), [(2, 172), (0, 174)])
    def test_misaligned_rows(self, op, fmt, start, stride):
        rows = as_strided(np.zeros(600, np.uint8)[start:], (3, 172), (stride, 1))
        with pytest.raises(ValueError, match="multiples of 4 bytes"):
            self.call(op, rows, cache_format=fmt, kv_lora_rank=128)

    def test_out_of_another_width_or_in_the_codes(self, op):
        how = {"cache_format": "fp8_ds_mla", "kv_lora_rank": 128}
        with pytest.raises(ValueError, match=r"out has shape \(3, 172\)"):
            self.call(op, DS_MLA, out=np.zeros((3, 172), bfloat16), **how)
        memory = np.zeros(3 * 600, np.uint8)
        rows = memory[: 3 * 172].reshape(3, 172)
        inside = memory[:900].view(bfloat16)[:444].reshape(3, 148)
        with pytest.raises(ValueError, match="out shares memory"):
            self.call(op, rows, out=inside, **how)


def test_numbers_are_never_restored_twice():
    for dtype in VALUES:
        with pytest.raises(TypeError, match=r"codes is .*these rows are numbers already"):
            dequantize_context(np.zeros((2, 8), dtype), cache_format="fp8_e4m3", k_scale=1.0)
    with pytest.raises(TypeError, match="rows of this cache are copied"):
        gather(np.zeros((2, 1, 8), bfloat16), ints(0, 1)[None], ints(0, 2), out_dtype=np.float32)


def test_a_packed_cache_needs_its_format_and_copies_take_no_scale():
    cache, table, bounds = np.zeros((2, 1, 8), np.uint8), ints(0, 1)[None], ints(0, 2)
    with pytest.raises(TypeError, match="cache_format must say"):
        gather(cache, table, bounds)
    with pytest.raises(ValueError, match="k_scale is given, but rows are copied"):
        gather(cache, table, bounds, out_dtype="uint8", k_scale=1.0)
    with pytest.raises(ValueError, match="k_scale is given, but rows are copied"):
        gather(cache.view(np.float16), table, bounds, k_scale=1.0)


def test_dtypes_of_torch_and_formats_that_are_numbers():
    torch = pytest.importorskip("torch")
    codes = torch.full((2, 48), 0x38, dtype=torch.uint8)
    out = dequantize_context(codes, cache_format="fp8_e4m3", k_scale=2.0, out_dtype=torch.float16)
    assert out.dtype == torch.float16
    assert bool((out == 2).all())
    with pytest.raises(TypeError, match="out_dtype"):
        dequantize_context(codes, cache_format="fp8_e4m3", k_scale=2.0, out_dtype=torch.float64)
    with pytest.raises(ValueError, match="cache_format"):
        dequantize_context(codes, cache_format="bfloat16")
