"""Conformance vectors: what is in the file, by other means than the formats, and what it finds."""

import hashlib
import math
import struct
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from sandbox.cache_formats import E4M3, E5M2, FORMATS, Widths, vectors
from sandbox.cache_formats.vectors import FILE, VERSION, load, make, save

KINDS = {"fp8_e4m3": E4M3, "fp8_e5m2": E5M2}
INTEGERS = {"int8_per_token": 127, "int4_per_token": 7}
DIGESTS = {1: "bbcaad0b5a66be46"}
"""Of the content by version: another content needs another version."""


def having(cache_format=None, name=None, rows=None, **fields):
    """Vectors with these fields; `rows` says whether they have rows for a writer."""
    wanted = {"cache_format": cache_format, "name": name, **fields}
    wanted = {key: value for key, value in wanted.items() if value is not None}
    return [
        each
        for each in load()
        if all(getattr(each, key) == value for key, value in wanted.items())
        and (rows is None or rows == (each.rows is not None))
    ]


def bits(array):
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


class TestFile:
    def test_is_what_the_formats_make(self):
        made, loaded = list(make()), load()
        assert [each.label for each in made] == [each.label for each in loaded]
        assert len({each.label for each in loaded}) == len(loaded)
        for one, other in zip(made, loaded):
            assert replace(one, rows=0, stored=0, values=0).__dict__ == (
                replace(other, rows=0, stored=0, values=0).__dict__
            )
            assert (one.rows is None) == (other.rows is None)
            for part in ("rows", "stored", "values"):
                left, right = getattr(one, part), getattr(other, part)
                if left is not None:
                    assert left.dtype == right.dtype, one.label
                    np.testing.assert_array_equal(bits(left), bits(right), one.label)

    def test_has_the_content_of_its_version(self):
        total = hashlib.sha256()
        for each in load():
            total.update(each.label.encode())
            for array in (each.rows, each.stored, each.values):
                if array is not None:
                    total.update(np.ascontiguousarray(bits(array)).tobytes())
        assert total.hexdigest()[:16] == DIGESTS[VERSION]

    def test_is_written_alike_and_small(self, tmp_path):
        few = having("int4_per_token")
        for name in ("one.npz", "two.npz"):
            save(few, tmp_path / name)
        assert (tmp_path / "one.npz").read_bytes() == (tmp_path / "two.npz").read_bytes()
        again = load(tmp_path / "one.npz")
        assert [each.label for each in again] == [each.label for each in few]
        np.testing.assert_array_equal(again[0].stored, few[0].stored)
        assert FILE.stat().st_size < 700_000

    def test_of_another_version_is_refused(self, tmp_path, monkeypatch):
        monkeypatch.setattr(vectors, "VERSION", VERSION + 1)
        save([], tmp_path / "new.npz")
        monkeypatch.undo()
        with pytest.raises(ValueError, match=rf"new.npz has version {VERSION + 1}, expected"):
            load(tmp_path / "new.npz")

    def test_cannot_be_changed_through_what_was_loaded(self):
        with pytest.raises(ValueError, match="read-only"):
            load()[0].stored[0, 0] = 1

    def test_covers_every_format_and_scale(self):
        assert {each.cache_format for each in load()} == set(FORMATS)
        for name, fmt in FORMATS.items():
            for rule in fmt.tile_scales:
                assert having(name, tile_scale=rule, rows=True)
            if fmt.needs_scale:
                assert {each.k_scale for each in having(name)} == {1.0, 0.1, 0.3, 0.125, 3.7}
            if fmt.packed:
                everything = np.arange(65536, dtype=np.uint16)
                for each in having(name, "all_bfloat16"):
                    assert np.isin(everything, bits(each.rows)).all()
                assert {(each.L, each.R) for each in having(name, rows=True)} > {(512, 64)}
            for each in having(name, "all_codes"):
                for part in fmt.layout(each.widths):
                    if part.dtype.itemsize == 1 and part.count:
                        codes = each.stored[:, part.offset : part.offset + part.nbytes]
                        assert len(np.unique(codes)) == 256, each.label


class TestByOtherMeans:
    """The file's bytes and values, from ml_dtypes, torch, Python's own numbers and by hand."""

    @pytest.mark.parametrize("name", KINDS)
    def test_per_tensor_codes_by_ml_dtypes(self, name):
        kind = KINDS[name]
        for each in having(name, rows=True):
            with np.errstate(all="ignore"):
                quotients = each.rows.astype(np.float32) / np.float32(each.k_scale)
                clipped = np.clip(quotients, -kind.largest, kind.largest)
            codes = clipped.astype(kind.dtype).view(np.uint8)
            codes[np.isnan(quotients)] = 0x7F
            np.testing.assert_array_equal(each.stored, codes, each.label)

    @pytest.mark.parametrize("name", KINDS)
    def test_per_tensor_codes_by_torch(self, name):
        torch = pytest.importorskip("torch")
        kind = KINDS[name]
        for each in having(name, rows=True):
            rows = torch.from_numpy(each.rows.astype(np.float32))
            quotients = rows / torch.tensor(each.k_scale, dtype=torch.float32)
            codes = quotients.to(getattr(torch, kind.dtype.name)).view(torch.uint8).numpy()
            inside = quotients.abs().numpy() <= kind.largest
            np.testing.assert_array_equal(each.stored[inside], codes[inside], each.label)

    @pytest.mark.parametrize("name", KINDS)
    def test_per_tensor_values_by_torch(self, name):
        torch = pytest.importorskip("torch")
        for each in having(name):
            codes = torch.from_numpy(each.stored.copy())
            numbers = codes.view(getattr(torch, KINDS[name].dtype.name)).float()
            values = (numbers * torch.tensor(each.k_scale, dtype=torch.float32)).numpy()
            np.testing.assert_array_equal(each.values, values, each.label)

    @pytest.mark.parametrize("rule", ["pow2", "raw"])
    def test_ds_mla_bytes_by_pythons_numbers(self, rule):
        for each in having("fp8_ds_mla", rows=True, tile_scale=rule):
            for row, stored in zip(each.rows[:30], each.stored[:30]):
                assert stored.tobytes() == ds_mla_row(row, each.L, rule, stored), each.label

    @pytest.mark.parametrize("name", INTEGERS)
    def test_integer_bytes_by_pythons_numbers(self, name):
        for each in having(name, rows=True):
            for row, stored in zip(each.rows[:24], each.stored[:24]):
                assert stored.tobytes() == integer_row(row, each.L, name), each.label

    def test_ds_mla_values_from_their_bytes(self):
        for each in having("fp8_ds_mla"):
            for stored, values in zip(each.stored[:20], each.values[:20]):
                codes = stored[: each.L].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
                scales = struct.unpack_from(f"<{each.L // 128}f", stored.tobytes(), each.L)
                with np.errstate(all="ignore"):
                    latent = codes * np.repeat(np.float32(scales), 128)
                key = stored[each.L + each.L // 32 :].view(np.uint16).astype(np.uint32) << 16
                want = np.concatenate([latent, key.view(np.float32)])
                np.testing.assert_array_equal(values, want, each.label)

    @pytest.mark.parametrize("name", INTEGERS)
    def test_integer_values_from_their_bytes(self, name):
        for each in having(name):
            for stored, values in zip(each.stored[:20], each.values[:20]):
                codes, (latent, key) = stored[:-8], struct.unpack("<2f", stored[-8:].tobytes())
                if name == "int4_per_token":
                    nibbles = [n for byte in codes.tolist() for n in (byte & 15, byte >> 4)]
                    codes = np.float32([n - 16 if n > 7 else n for n in nibbles])
                else:
                    codes = codes.view(np.int8).astype(np.float32)
                scales = np.repeat(np.float32([latent, key]), [each.L, each.R])
                with np.errstate(all="ignore"):
                    np.testing.assert_array_equal(values, codes * scales, each.label)

    def test_edges_by_hand(self):
        (each,) = having("fp8_e4m3", "edges", k_scale=1.0, L=40)
        codes = dict(zip(bits(each.rows)[:2, :40].ravel().tolist(), each.stored[:2, :40].ravel()))
        by_hand = [(448, 0x7E), (464, 0x7E), (1000, 0x7E), (math.inf, 0x7E), (-math.inf, 0xFE)]
        by_hand += [(2**-9, 0x01), (2**-10, 0x00), (1.5 * 2**-9, 0x02), (2**-6, 0x08), (0.0, 0x00)]
        by_hand += [(1.0625, 0x38), (1.1875, 0x3A), (17, 0x58), (19, 0x5A), (0.5, 0x30)]
        by_hand += [(1.75 * 2**-7, 0x07), (-(2**-10), 0x80), (-0.0, 0x80), (-448, 0xFE)]
        for number, code in by_hand:
            pattern = int(bits(np.array(number, ml_dtypes.bfloat16)))
            assert codes[pattern] == code, number
        assert codes[0x7FC0] == codes[0xFFC0] == 0x7F

    @pytest.mark.parametrize(("rule", "scale"), [("pow2", "0000003f"), ("raw", "0000c03e")])
    def test_a_tile_by_hand(self, rule, scale):
        """amax 168: raw scale 0.375, pow2 scale 0.5; 168 is 0x7E by the first and 0x7A (320),
        rounded from 336 to even, by the second."""
        rows = np.zeros((1, 128), np.float32)
        rows[0, :3] = 168, -168, 21
        stored = FORMATS["fp8_ds_mla"].encode(rows, Widths(128, 0), tile_scale=rule)
        assert stored[0, 128:].tobytes().hex() == scale
        want = {"pow2": [0x7A, 0xFA, 0x62], "raw": [0x7E, 0xFE, 0x66]}[rule]
        assert stored[0, :3].tolist() == want


def ds_mla_row(row, L, rule, stored):
    """The bytes of a row by floats of Python; where a key is NaN, those of `stored`."""
    codes, scales = b"", b""
    for start in range(0, L, 128):
        tile = [float(x) for x in row[start : start + 128]]
        amax = max((abs(x) for x in tile if math.isfinite(x)), default=0.0)
        scale = float(np.float32(amax) / np.float32(448))
        if rule == "raw":
            scale = max(scale, 2.0**-126)
        else:
            mantissa, exponent = math.frexp(max(scale, float(np.float32(1e-4))))
            scale = 2.0 ** (exponent - (mantissa == 0.5))
        scales += struct.pack("<f", scale)
        codes += bytes(e4m3_code(x, scale) for x in tile)
    key = row[L:].astype(np.float32).astype(ml_dtypes.bfloat16)
    nan = np.isnan(key)
    key = bits(key)
    key[nan] = stored[L + L // 32 :].view(np.uint16)[nan]
    return codes + scales + key.tobytes()


def e4m3_code(value, scale):
    if math.isnan(value):
        return 0x7F
    with np.errstate(over="ignore"):
        quotient = float(np.float32(value) / np.float32(scale))
    sign = 0x80 if math.copysign(1, value) < 0 else 0
    magnitude = min(abs(quotient), 448.0)
    exponent = max(math.frexp(magnitude)[1] - 1, -6) if magnitude else -6
    steps = round(magnitude / 2.0 ** (exponent - 3))
    return sign | (((exponent + 6) << 3) + steps)


def integer_row(row, L, name):
    """The bytes of a row by floats of Python."""
    largest = INTEGERS[name]
    codes, scales = [], b""
    for half in (row[:L], row[L:]):
        values = [float(x) for x in half]
        if not all(map(math.isfinite, values)):
            codes += [0] * len(values)
            scales += bytes.fromhex("0000c07f")
            continue
        amax = np.float32(max(map(abs, values), default=0))
        scale = max(amax / np.float32(largest), np.float32(2.0**-126))
        scales += struct.pack("<f", scale)
        quotients = [round(float(np.float32(x) / scale)) for x in values]
        codes += [min(max(q, -largest), largest) for q in quotients]
    if name == "int8_per_token":
        return struct.pack(f"{len(codes)}b", *codes) + scales
    pairs = zip(codes[::2], codes[1::2])
    return bytes((even & 15) | (odd & 15) << 4 for even, odd in pairs) + scales
