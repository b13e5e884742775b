"""Cache formats: sizes, fields, what is refused, what a row becomes and reads back as."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox.cache_formats import E4M3, FORMATS, Widths, format_named, format_of
from sandbox.dims import PRESETS

DEEPSEEK = Widths(512, 64)
PACKED = [name for name, fmt in FORMATS.items() if fmt.packed]
WITH_RULE = [(name, rule) for name in PACKED for rule in FORMATS[name].tile_scales or (None,)]
NARROW = {"fp8_ds_mla": Widths(128, 6)}
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
EXAMPLES = settings(max_examples=40, deadline=None, database=None, derandomize=True)


def narrow(name):
    return NARROW.get(name, Widths(40, 8))


def scales(name):
    return {"k_scale": 0.37} if FORMATS[name].needs_scale else {}


def field(stored, name, dims, part):
    place = FORMATS[name].fields(dims)[part]
    elements = np.ascontiguousarray(stored[..., place.offset : place.offset + place.nbytes])
    return elements.view(place.dtype)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("float32", 2304),
        ("float16", 1152),
        ("bfloat16", 1152),
        ("fp8_e4m3", 576),
        ("fp8_e5m2", 576),
        ("fp8_ds_mla", 656),
        ("int8_per_token", 584),
        ("int4_per_token", 296),
    ],
)
def test_bytes_of_a_deepseek_row(name, size):
    for dims in (DEEPSEEK, PRESETS["deepseek_v3"]):
        assert FORMATS[name].row_bytes(dims) == size
    assert FORMATS[name].cache_shape(DEEPSEEK, 7, 64)[:2] == (7, 64)
    assert FORMATS[name].row_elements(DEEPSEEK) * FORMATS[name].storage.itemsize == size


@pytest.mark.parametrize(
    ("name", "offsets"),
    [
        ("bfloat16", {"kv_c": 0, "k_pe": 1024}),
        ("fp8_e4m3", {"kv_c": 0, "k_pe": 512}),
        ("fp8_ds_mla", {"kv_c": 0, "kv_c_scales": 512, "k_pe": 528}),
        ("int8_per_token", {"kv_c": 0, "k_pe": 512, "kv_c_scale": 576, "k_pe_scale": 580}),
        ("int4_per_token", {"kv_c": 0, "k_pe": 256, "kv_c_scale": 288, "k_pe_scale": 292}),
    ],
)
def test_offsets(name, offsets):
    assert {n: f.offset for n, f in FORMATS[name].fields(DEEPSEEK).items()} == offsets


@pytest.mark.parametrize("name", FORMATS)
@EXAMPLES
@given(L=st.integers(1, 1100), pairs=st.integers(0, 70))
def test_fields_tile_the_row_and_widths_inverts_its_size(name, L, pairs):
    fmt, dims = FORMATS[name], Widths(L, 2 * pairs)
    if fmt.refuses(dims):
        with pytest.raises(ValueError, match=f"{name} has no layout for L = {L}"):
            fmt.row_bytes(dims)
        return
    end = 0
    for each in fmt.layout(dims):
        assert each.offset == end
        assert each.offset % each.dtype.itemsize == 0
        end += each.nbytes
    assert end == fmt.row_bytes(dims)
    assert end % fmt.alignment == 0
    assert fmt.widths(fmt.row_elements(dims), L) == dims


@pytest.mark.parametrize("name", FORMATS)
@EXAMPLES
@given(elements=st.integers(0, 700), L=st.integers(-3, 600))
def test_widths_gives_a_layout_of_that_size_or_refuses(name, elements, L):
    fmt = FORMATS[name]
    dims = [Widths(L, R) for R in range(0, 1402, 2) if L > 0 and not fmt.refuses(Widths(L, R))]
    fitting = [each for each in dims if fmt.row_elements(each) == elements]
    if fitting:
        assert [fmt.widths(elements, L)] == fitting
    else:
        with pytest.raises(ValueError, match=f"rows of {elements} elements|has no layout"):
            fmt.widths(elements, L)


@pytest.mark.parametrize(
    ("name", "L", "R", "reason"),
    [
        ("fp8_ds_mla", 40, 8, "multiple of 128"),
        ("fp8_ds_mla", 576, 0, "multiple of 128"),
        ("int8_per_token", 41, 2, "multiple of 4"),
        ("int4_per_token", 43, 5, "even"),
        ("int4_per_token", 42, 8, "multiple of 8"),
    ],
)
def test_widths_without_a_layout(name, L, R, reason):
    rows = np.zeros((2, L + R), np.float32)
    for call in (
        lambda fmt, dims: fmt.row_bytes(dims),
        lambda fmt, dims: fmt.row_elements(dims),
        lambda fmt, dims: fmt.fields(dims),
        lambda fmt, dims: fmt.cache_shape(dims, 1, 1),
        lambda fmt, dims: fmt.encode(rows, dims),
        lambda fmt, dims: fmt.decode(np.zeros((2, 60), np.uint8), dims),
    ):
        with pytest.raises(ValueError, match=reason):
            call(FORMATS[name], Widths(L, R))


@pytest.mark.parametrize("name", FORMATS)
def test_wrong_widths_and_dtypes_are_refused(name):
    fmt, dims = FORMATS[name], narrow(name)
    rows = np.zeros((3, dims.L + dims.R + 2), np.float32)
    with pytest.raises(ValueError, match=f"last axis {rows.shape[1]}, expected L \\+ R"):
        fmt.encode(rows, dims, **scales(name))
    stored = fmt.encode(rows[:, :-2], dims, **scales(name))
    with pytest.raises(ValueError, match="last axis"):
        fmt.decode(stored[:, :-1], dims, **scales(name))
    with pytest.raises(TypeError, match=f"expected {fmt.storage} for {name}"):
        fmt.decode(stored.astype(np.int32), dims, **scales(name))


@pytest.mark.parametrize("name", FORMATS)
def test_scales_that_are_missing_or_not_wanted_are_refused(name):
    fmt, dims = FORMATS[name], narrow(name)
    rows = np.zeros((1, dims.L + dims.R), np.float32)
    stored = fmt.encode(rows, dims, **scales(name))
    other, message = ({}, "is missing") if fmt.needs_scale else ({"k_scale": 1.0}, "is given")
    with pytest.raises(ValueError, match=f"k_scale {message}"):
        fmt.encode(rows, dims, **other)
    with pytest.raises(ValueError, match=f"k_scale {message}"):
        fmt.decode(stored, dims, **other)
    wrong = "e8m0" if fmt.tile_scales else "pow2"
    with pytest.raises(ValueError, match=f"tile_scale is '{wrong}'"):
        fmt.encode(rows, dims, tile_scale=wrong, **scales(name))


def test_formats_are_found_by_name_and_dtype():
    for name, fmt in FORMATS.items():
        assert fmt.name == name
        assert format_named(name, fmt.storage) is fmt
        if not fmt.packed:
            assert format_of(fmt.storage) is format_named(None, fmt.storage) is fmt
    with pytest.raises(TypeError, match="cache_format must say which of fp8_e4m3"):
        format_of(np.dtype(np.uint8))
    with pytest.raises(TypeError, match="int16, expected one of float32"):
        format_named(None, np.dtype(np.int16))
    with pytest.raises(ValueError, match="'nvfp4_ds_mla', expected one of"):
        format_named("nvfp4_ds_mla", np.dtype(np.uint8))
    with pytest.raises(TypeError, match="cache is float32, expected uint8 for fp8_ds_mla"):
        format_named("fp8_ds_mla", np.dtype(np.float32))
    with pytest.raises(TypeError, match="expected a name"):
        format_named(np.dtype(np.uint8), np.dtype(np.uint8))


@pytest.mark.parametrize(("name", "rule"), WITH_RULE)
@EXAMPLES
@given(seed=st.integers(0, 1000), exponent=st.integers(-9, 9))
def test_what_was_read_is_written_as_it_was(name, rule, seed, exponent):
    """Encoding loses something once: decoded rows encode to rows that decode to the same."""
    fmt, dims = FORMATS[name], narrow(name)
    rows = np.random.default_rng(seed).standard_normal((3, dims.L + dims.R)) * 2.0**exponent
    once = fmt.decode(fmt.encode(rows, dims, tile_scale=rule, **scales(name)), dims, **scales(name))
    again = fmt.encode(once, dims, tile_scale=rule, **scales(name))
    twice = fmt.decode(again, dims, **scales(name))
    steps = {"int8_per_token": 127, "int4_per_token": 7}.get(name, 2**4)
    largest = np.abs(once).max()
    np.testing.assert_allclose(twice, once, rtol=3e-7, atol=largest * 1e-6)
    saturation = 448 * 0.37 if fmt.needs_scale else np.inf
    inside = np.abs(rows) < saturation
    allowed = np.abs(rows) / 2**3 + np.abs(rows).max() / steps
    assert (np.abs(once - rows) <= allowed)[inside].all()


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_plain_rows_are_their_bits(name, rng):
    fmt, dims = FORMATS[name], Widths(43, 6)
    words = rng.integers(0, 2**16, (5, 49 * fmt.storage.itemsize // 2), dtype=np.uint16)
    rows = words.view(fmt.storage)
    np.testing.assert_array_equal(fmt.encode(rows, dims).view(np.uint16), words)
    np.testing.assert_array_equal(fmt.decode(rows, dims), rows.astype(np.float32))


@pytest.mark.parametrize(("name", "rule"), WITH_RULE)
@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 3)])
@pytest.mark.parametrize("R", [0, 8])
def test_any_leading_axes_and_no_key(name, rule, shape, R, rng):
    fmt, dims = FORMATS[name], Widths(128, R)
    rows = rng.standard_normal((*shape, 128 + R))
    stored = fmt.encode(rows, dims, tile_scale=rule, **scales(name))
    assert stored.shape == (*shape, fmt.row_elements(dims))
    assert stored.dtype == np.uint8
    values = fmt.decode(stored, dims, **scales(name))
    assert values.shape == rows.shape
    assert values.dtype == np.float32
    flat = fmt.encode(rows.reshape(-1, 128 + R), dims, tile_scale=rule, **scales(name))
    np.testing.assert_array_equal(flat.reshape(stored.shape), stored)


@pytest.mark.parametrize(("name", "rule"), WITH_RULE)
def test_strided_rows_and_rows_that_may_not_change(name, rule, rng):
    fmt, dims = FORMATS[name], Widths(128, 8)
    wide = rng.standard_normal((6, 200)).astype(np.float32)
    view = wide[::2, 30:166]
    view.flags.writeable = False
    stored = fmt.encode(view, dims, tile_scale=rule, **scales(name))
    np.testing.assert_array_equal(
        stored, fmt.encode(view.copy(), dims, tile_scale=rule, **scales(name))
    )
    padded = np.full((3, stored.shape[1] + 7), 0xFF, np.uint8)
    padded[:, 3:-4] = stored
    np.testing.assert_array_equal(
        fmt.decode(padded[:, 3:-4], dims, **scales(name)), fmt.decode(stored, dims, **scales(name))
    )


def test_per_tensor_fp8_divides_by_the_scale():
    """0x48 is 4 in E4M3: read with k_scale 0.5 both the latent and the key are 2."""
    fmt, dims = FORMATS["fp8_e4m3"], DEEPSEEK
    assert (fmt.decode(np.full((1, 576), 0x48, np.uint8), dims, k_scale=0.5) == 2).all()
    assert (fmt.encode(np.full((1, 576), 2.0), dims, k_scale=0.5) == 0x48).all()


def test_values_are_rounded_to_float32_first():
    """In float64 this is above the tie of 16 and 18; its float32 is the tie, which goes to 16."""
    above = np.full((1, 48), 17 + 1e-9)
    assert (FORMATS["fp8_e4m3"].encode(above, Widths(40, 8), k_scale=1) == 0x58).all()


@pytest.mark.parametrize(
    ("amax", "pow2", "raw"),
    [
        (336.0, 1.0, 0.75),
        (-336.0, 1.0, 0.75),
        (448.0, 1.0, 1.0),
        (449.0, 2.0, np.float32(449) / np.float32(448)),
        (0.0, 2.0**-13, 2.0**-126),
        (2.0**-133, 2.0**-13, 2.0**-126),
        (448 * 2.0**-13, 2.0**-13, 2.0**-13),
        (448 * 2.0**-14, 2.0**-13, 2.0**-14),
        (3e38, 2.0**120, np.float32(3e38) / np.float32(448)),
    ],
)
def test_tile_scales(amax, pow2, raw):
    rows = np.zeros((1, 128), np.float32)
    rows[0, 77] = amax
    for rule, scale in (("pow2", pow2), ("raw", raw)):
        stored = FORMATS["fp8_ds_mla"].encode(rows, Widths(128, 0), tile_scale=rule)
        assert stored[:, 128:].view(np.float32).item() == np.float32(scale)
    default = FORMATS["fp8_ds_mla"].encode(rows, Widths(128, 0))
    assert default[:, 128:].view(np.float32).item() == np.float32(pow2)


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_nan_and_infinity_in_fp8(name):
    fmt, dims = FORMATS[name], Widths(40, 8)
    rows = np.ones((1, 48), np.float32)
    rows[0, 3:7] = np.nan, -np.nan, np.inf, -np.inf
    rows[0, -1] = np.nan
    stored = fmt.encode(rows, dims, k_scale=0.5)
    values = fmt.decode(stored, dims, k_scale=0.5)[0]
    assert stored[0, [3, 4, 47]].tolist() == [0x7F, 0x7F, 0x7F]
    largest = 224.0 if name == "fp8_e4m3" else 28672.0
    assert values[5:7].tolist() == [largest, -largest]
    assert np.isnan(values[[3, 4, 47]]).all()
    assert (np.delete(values, [3, 4, 5, 6, 47]) == 1).all()


@pytest.mark.parametrize("rule", ["pow2", "raw"])
def test_what_is_not_finite_leaves_the_rest_of_its_tile_alone(rule, rng):
    fmt, dims = FORMATS["fp8_ds_mla"], Widths(256, 4)
    rows = rng.standard_normal((1, 260)).astype(np.float32)
    hostile = rows.copy()
    hostile[0, [1, 5, 9, 258]] = np.nan, np.inf, -np.inf, np.nan
    rows[0, [1, 5, 9]] = 0
    rest = np.delete(np.arange(260), [1, 5, 9, 258])
    clean, dirty = (fmt.encode(r, dims, tile_scale=rule) for r in (rows, hostile))
    values = fmt.decode(dirty, dims)
    np.testing.assert_array_equal(values[:, rest], fmt.decode(clean, dims)[:, rest])
    np.testing.assert_array_equal(dirty[:, 256:264], clean[:, 256:264])
    assert dirty[0, [1, 5, 9]].tolist() == [0x7F, 0x7E, 0xFE]
    assert np.isnan(values[0, [1, 258]]).all()


@pytest.mark.parametrize(("name", "largest"), [("int8_per_token", 127), ("int4_per_token", 7)])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", [0, 39, 40, 47])
def test_a_half_that_is_not_finite_reads_nan_and_spares_the_other(name, largest, bad, column, rng):
    fmt, dims = FORMATS[name], Widths(40, 8)
    rows = rng.standard_normal((1, 48)).astype(np.float32)
    good = fmt.decode(fmt.encode(rows, dims), dims)
    rows[0, column] = bad
    stored = fmt.encode(rows, dims)
    values = fmt.decode(stored, dims)
    lost, kept = (slice(40), slice(40, 48)) if column < 40 else (slice(40, 48), slice(40))
    assert np.isnan(values[0, lost]).all()
    np.testing.assert_array_equal(values[0, kept], good[0, kept])
    part, scale = ("kv_c", "kv_c_scale") if column < 40 else ("k_pe", "k_pe_scale")
    assert not field(stored, name, dims, part).any()
    assert field(stored, name, dims, scale).view(np.uint32).item() == 0x7FC00000


@pytest.mark.parametrize(("name", "largest"), [("int8_per_token", 127), ("int4_per_token", 7)])
def test_integers_are_symmetric_and_round_to_even(name, largest):
    fmt, dims = FORMATS[name], Widths(8, 8)
    latent = [largest, -largest, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]
    stored = fmt.encode(np.float32([latent + [0] * 8]), dims)
    values = fmt.decode(stored, dims)[0]
    assert values.tolist() == [largest, -largest, 0, 2, 2, 0, -2, -2] + [0] * 8
    assert field(stored, name, dims, "kv_c_scale").item() == 1
    assert field(stored, name, dims, "k_pe_scale").item() == np.finfo(np.float32).tiny


def test_int4_puts_even_columns_in_low_nibbles():
    stored = FORMATS["int4_per_token"].encode(
        np.float32([[7, -7, 1, -2, 3, 0, -1, 5]]), Widths(8, 0)
    )
    assert stored[0, :4].tolist() == [0x97, 0xE1, 0x03, 0x5F]


def test_the_key_of_ds_mla_is_rounded_once_to_bfloat16():
    """float16 bits are not taken for bf16, and float32 is rounded to even."""
    for dtype, value in ((np.float16, 1 + 2.0**-10), (np.float32, 1 + 3 * 2.0**-8)):
        rows = np.full((1, 130), value, dtype)
        stored = FORMATS["fp8_ds_mla"].encode(rows, Widths(128, 2))
        key = field(stored, "fp8_ds_mla", Widths(128, 2), "k_pe")
        assert key.dtype == BFLOAT16
        np.testing.assert_array_equal(key, rows[:, 128:].astype(np.float32).astype(BFLOAT16))


def test_any_float32_is_read_as_a_tile_scale():
    for scale in (0.75, 3.7, 1e-41, 1e38, 0.0, np.inf, np.nan):
        stored = np.concatenate([np.full(128, 0x38, np.uint8), np.float32([scale]).view(np.uint8)])
        values = FORMATS["fp8_ds_mla"].decode(stored[None], Widths(128, 0))
        np.testing.assert_array_equal(values, np.full((1, 128), np.float32(scale)))


def test_float8_has_the_numbers_of_its_dtype():
    assert E4M3.decode(np.uint8([0x7E, 0x01, 0x08])).tolist() == [448, 2.0**-9, 2.0**-6]


@pytest.mark.parametrize("widths", [Widths(-5, 0), Widths(0, 0), Widths(128, -2), Widths(8, 3)])
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_widths_are_whole_positive_and_even(fmt, widths):
    with pytest.raises(ValueError, match="L is"):
        fmt.row_bytes(widths)


@pytest.mark.parametrize("k_scale", [0, -1, np.nan, np.inf, 1e39, True, [[0.5], [0.2]]])
def test_a_scale_to_divide_by_is_a_positive_number(k_scale):
    with pytest.raises(ValueError, match="k_scale"):
        FORMATS["fp8_e4m3"].encode(np.ones((2, 10), np.float32), Widths(8, 2), k_scale=k_scale)
