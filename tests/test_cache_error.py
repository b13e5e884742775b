"""What cache formats err: the data, the metrics, the ways, the command."""

import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from experiments.__main__ import app
from experiments.attention_error import METRICS, attend, errors
from experiments.cache_ways import ways
from experiments.synthetic_latents import BadData, captured, synthetic
from sandbox.cache_formats import FORMATS
from sandbox.dims import PRESETS, MLADims

V3 = PRESETS["deepseek_v3"]
SMALL = MLADims(2, 64, 256, 24, 32, 16)
WAYS = {way.name: way for fmt in FORMATS.values() for way in ways(fmt)}
RUN = ("cache_error", "--dims", "tiny", "--tokens", "48", "--heads", "3", "--seeds", "2")


def made(seed=0, dims=SMALL, magnitude=1.0, key_outlier=20.0):
    return synthetic(dims, 256, 6, seed, key_outlier, magnitude)


def measured(name, data, dims=SMALL):
    exact = attend(data.rows, data.q, dims.L, dims.softmax_scale)
    read = WAYS[name].read_back(data.rows, dims)
    return errors(exact, attend(read, data.q, dims.L, dims.softmax_scale))


def run(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def lines(folder):
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


class TestData:
    def test_a_seed_decides_everything(self):
        first, again, other = made(1), made(1), made(2)
        for name in ("kv_c", "k_pe", "q"):
            assert np.array_equal(getattr(first, name), getattr(again, name))
            assert not np.array_equal(getattr(first, name), getattr(other, name))
            assert getattr(first, name).dtype == np.float32

    def test_keys_are_rotated_by_their_positions(self):
        turned, plain = made().k_pe, made(dims=replace(SMALL, rope=False)).k_pe
        assert np.array_equal(turned[0], plain[0])
        angle = 7 * 10000.0 ** (-np.arange(0, SMALL.R, 2) / SMALL.R)
        even, odd = plain[7, 0::2], plain[7, 1::2]
        assert turned[7, 0::2] == pytest.approx(
            np.cos(angle) * even - np.sin(angle) * odd, rel=1e-4
        )
        assert turned[7, 1::2] == pytest.approx(
            np.sin(angle) * even + np.cos(angle) * odd, rel=1e-4
        )

    def test_few_channels_of_the_keys_are_large(self):
        rms = np.sort(np.sqrt(np.square(made(dims=V3).k_pe).mean(axis=0)))
        assert 10 < rms[-1] / np.median(rms) < 30
        assert (rms > 4 * np.median(rms)).sum() == 6

    def test_heads_from_flat_to_peaky_with_a_sink(self):
        data = synthetic(V3, 2048, 16, 0, 20.0, 1.0)
        exact = attend(data.rows, data.q, V3.L, V3.softmax_scale)
        assert exact.entropies.min() < 2.5 < 5.5 < exact.entropies.max() < np.log(2048)
        assert exact.sinks.min() < 0.05 < 0.5 < exact.sinks.max()

    @pytest.mark.parametrize("changes", [{"qk_rope_head_dim": 0}, {"qk_rope_head_dim": 2}])
    def test_narrow_keys(self, changes):
        dims = replace(SMALL, **changes)
        data = made(dims=dims)
        assert data.k_pe.shape == (256, dims.R)
        found = measured("int8_per_token" if dims.R == 0 else "fp8_e4m3", data, dims)
        assert (found["key_rms"] is None) == (dims.R == 0)
        assert 0 < found["output_rms"] < 0.2


class TestMetrics:
    def test_attention_is_softmax_over_rows(self):
        data = made()
        exact = attend(data.rows, data.q, SMALL.L, 0.3)
        rows, q = data.rows.astype(float), data.q[2].astype(float)
        weights = np.exp(0.3 * rows @ q)
        weights /= weights.sum()
        assert exact.out[2] == pytest.approx(weights @ rows[:, : SMALL.L], rel=1e-9)
        assert exact.entropies[2] == pytest.approx(-(weights * np.log(weights)).sum(), rel=1e-9)

    def test_against_hand_computed_numbers(self):
        # Two tokens, latents (2, 0) and (0, 2), keys 1 and 1; the query sees the key alone.
        rows = np.array([[2.0, 0.0, 1.0], [0.0, 2.0, 1.0]])
        q = np.array([[0.0, 0.0, 1.0]])
        exact = attend(rows, q, 2, 1.0)
        assert exact.out == pytest.approx(np.array([[1.0, 1.0]]))
        off = rows + np.array([[0.0, 0.0, np.log(3.0)], [0.0, 0.0, 0.0]])  # weights 3/4, 1/4
        found = errors(exact, attend(off, q, 2, 1.0))
        assert set(found) == set(METRICS)
        assert found["latent_rms"] == 0
        assert found["latent_snr_db"] == np.inf
        assert found["key_rms"] == pytest.approx(np.log(3) / np.sqrt(2))
        assert found["key_max"] == found["score_max"] == pytest.approx(np.log(3))
        assert found["score_rms"] == pytest.approx(np.log(3) / np.sqrt(2))
        assert found["tv"] == found["tv_worst"] == pytest.approx(0.25)
        assert found["kl"] == pytest.approx(0.5 * np.log(4 / 3))
        assert found["output_rms"] == pytest.approx(0.5)  # (1.5, 0.5) for (1, 1)
        assert found["output_cosine"] == pytest.approx(1 - 2 / np.sqrt(5))

    def test_scaled_values_have_the_same_direction(self):
        data = made()
        exact = attend(data.rows, data.q, SMALL.L, SMALL.softmax_scale)
        found = errors(exact, replace(exact, out=1.1 * exact.out))
        assert found["output_rms"] == pytest.approx(0.1)
        assert found["output_cosine"] == pytest.approx(0, abs=1e-12)
        assert found["kl"] == found["tv"] == 0


class TestWays:
    def test_float32_is_exact(self):
        found = measured("float32", made())
        assert found.pop("latent_snr_db") == found.pop("key_snr_db") == np.inf
        assert max(found.values()) < 1e-14

    def test_two_rules_for_the_scales_of_tiles(self):
        rows = np.random.default_rng(0).standard_normal((512, V3.E), np.float32)
        rms = {
            name: np.sqrt(np.square(WAYS[name].read_back(0.8 * rows, V3) - 0.8 * rows).mean()) / 0.8
            for name in ("fp8_ds_mla", "fp8_ds_mla raw", "fp8_ds_mla misread")
        }
        # The keys, one value in nine, are bfloat16.
        share = np.sqrt(V3.L / V3.E)
        assert rms["fp8_ds_mla"] == pytest.approx(0.0266 * share, rel=0.01)
        assert rms["fp8_ds_mla raw"] == pytest.approx(0.0257 * share, rel=0.01)
        assert rms["fp8_ds_mla misread"] == pytest.approx(0.25 * share, rel=0.02)

    @pytest.mark.parametrize(
        "name",
        ["fp8_e4m3", "fp8_e5m2", "fp8_e4m3 latent scale", "int8_per_token", "int4_per_token"],
    )
    def test_scaled_formats_do_not_see_the_magnitude(self, name):
        found = measured(name, made())
        for magnitude in (2.0**-9, 2.0**9):
            other = measured(name, made(magnitude=magnitude))
            assert other == pytest.approx(found, rel=1e-6)

    def test_uncalibrated_codes_run_out_of_exponents(self):
        small = made(magnitude=2.0**-9)
        calibrated, plain = (measured(n, small) for n in ("fp8_e4m3", "fp8_e4m3 k_scale=1"))
        assert plain["latent_rms"] > 4 * calibrated["latent_rms"]
        large = measured("fp8_e4m3 k_scale=1", made(magnitude=2.0**5))
        assert large["key_max"] > 0.3

    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
    def test_a_scale_of_the_latents_alone_saturates_the_keys(self, name, seed):
        data = made(seed)
        read = WAYS[f"{name} latent scale"].read_back(data.rows, SMALL)
        largest = np.abs(data.kv_c).max()
        assert np.abs(data.k_pe).max() > 1.3 * largest
        assert np.abs(read).max() == pytest.approx(largest, rel=1e-6)
        trap, meant = measured(f"{name} latent scale", data), measured(name, data)
        assert trap["key_max"] > 0.2 > 2 * meant["key_max"]
        assert trap["score_max"] > 2 * meant["score_max"]
        assert trap["latent_rms"] == pytest.approx(meant["latent_rms"], rel=0.1)

    @pytest.mark.parametrize("seed", range(3))
    def test_order_of_the_formats(self, seed):
        data = made(seed)
        latent, key = (
            {name: measured(name, data)[part] for name in WAYS}
            for part in ("latent_rms", "key_rms")
        )
        order = ["float16", "bfloat16", "int8_per_token", "fp8_e4m3", "fp8_e5m2", "int4_per_token"]
        assert sorted(order, key=latent.get) == order
        assert sorted(order, key=key.get) == order
        assert latent["fp8_e5m2"] == pytest.approx(2 * latent["fp8_e4m3"], rel=0.1)
        assert latent["float16"] == pytest.approx(latent["bfloat16"] / 8, rel=0.1)
        assert key["fp8_ds_mla"] == key["bfloat16"]
        assert latent["fp8_ds_mla raw"] < latent["fp8_ds_mla"] < 1.1 * latent["fp8_e4m3"]
        assert latent["fp8_ds_mla misread"] > 5 * latent["fp8_ds_mla"]


class TestCommand:
    def test_leaves_rows_tables_and_a_plot(self, tmp_path):
        done = run(*RUN, "--out", tmp_path / "one")
        assert done.exit_code == 0, done.output
        assert {path.name for path in (tmp_path / "one").iterdir()} == {
            "rows.jsonl",
            "fingerprint.json",
            "table.txt",
            "table.md",
            "cache_error.png",
        }
        found = lines(tmp_path / "one")
        assert {row["name"] for row in found} == {
            name for name in WAYS if not name.startswith(("float32", "fp8_ds_mla "))
        }
        sizes = [row["bytes_per_token"] for row in found if row["samples"]]
        assert sizes == sorted(sizes)
        for row in found:
            if row["format"] == "fp8_ds_mla":
                assert "multiple of 128" in row["message"]
            else:
                assert set(row["samples"]) == set(METRICS)
                assert {len(each) for each in row["samples"].values()} == {2}
                assert len(set(row["samples"]["latent_rms"])) == 2
                assert row["bytes_per_token"] == FORMATS[row["format"]].row_bytes(PRESETS["tiny"])
        text = (tmp_path / "one" / "table.txt").read_text()
        assert max(map(len, text.splitlines())) <= 120
        assert "…" not in text
        assert "fp8_ds_mla not run" in text
        for row in found:
            assert row["name"] in text
        run(*RUN, "--out", tmp_path / "two")
        assert lines(tmp_path / "two") == found

    def test_rounding_before_the_cache_counts(self, tmp_path):
        arguments = (*RUN, "--format", "float32,bfloat16", "--dtype", "bfloat16")
        assert run(*arguments, "--out", tmp_path).exit_code == 0
        first, second = (row["samples"] for row in lines(tmp_path))
        assert first == second
        assert min(first["latent_rms"]) > 1e-3

    @pytest.mark.parametrize("own_queries", [False, True])
    def test_captured_data(self, tmp_path, own_queries):
        dims = PRESETS["tiny"]
        data = synthetic(dims, 30, 4, 5, 20.0, 1.0)
        arrays = {"kv_c": data.kv_c.astype(np.float16), "k_pe": data.k_pe.astype(np.float64)}
        np.savez(tmp_path / "layer.npz", **arrays, **({"q": data.q} if own_queries else {}))
        command = (*RUN, "--format", "fp8_e4m3", "--data", tmp_path / "layer.npz")
        done = run(*command, "--out", tmp_path / "run")
        assert done.exit_code == 0, done.output
        row = next(row for row in lines(tmp_path / "run") if row["name"] == "fp8_e4m3")
        shape = {key: row["setup"][key] for key in ("tokens", "heads", "seeds", "magnitude")}
        heads, seeds = (4, 1) if own_queries else (3, 2)
        assert shape == {"tokens": 30, "heads": heads, "seeds": seeds, "magnitude": None}
        if own_queries:
            rounded = replace(data, kv_c=data.kv_c.astype(np.float16).astype(np.float32))
            expected = measured("fp8_e4m3", rounded, dims)
            assert {metric: each[0] for metric, each in row["samples"].items()} == expected

    @pytest.mark.parametrize(
        ("option", "message"),
        [
            (("--format", "fp8"), "'fp8': expected float32, float16"),
            (("--dims", "deepseek"), "no such preset"),
            (("--dims", "R=7"), "even number"),
            (("--dtype", "int8"), "--dtype 'int8'"),
            (("--data", "none.npz"), "none.npz is missing, or no .npz file"),
            (("--format", "fp8_ds_mla"), "L must be a multiple of 128"),
            (("--tokens", "1"), "--tokens"),
            (("--seeds", "0"), "--seeds"),
            (("--magnitude", "0"), "--magnitude"),
        ],
    )
    def test_bad_options_are_refused(self, tmp_path, option, message):
        done = run(*RUN, *option, "--out", tmp_path / "run")
        assert done.exit_code == 2
        assert message in done.output
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k_pe": None}, "k_pe is missing"),
        (
            {"kv_c": np.zeros((4, 41))},
            r"kv_c has shape \(4, 41\), expected \[tokens or heads, 40\]",
        ),
        ({"kv_c": np.zeros((0, 40))}, "kv_c has shape"),
        ({"k_pe": np.zeros((5, 8))}, "kv_c has 4 tokens, k_pe 5"),
        ({"k_pe": np.full((4, 8), np.nan)}, "k_pe holds a NaN"),
        ({"kv_c": np.full((4, 40), 1e39)}, "kv_c holds a NaN or a number"),
        ({"kv_c": np.zeros((4, 40), int)}, "kv_c is int64, expected float16"),
        ({"q": np.zeros((3, 40))}, "q has shape"),
        ({"q": np.array([{}, {}])}, "cannot be read"),
    ],
)
def test_bad_files_are_refused(tmp_path, changes, message):
    arrays = {"kv_c": np.ones((4, 40)), "k_pe": np.ones((4, 8))}
    arrays = {name: array for name, array in {**arrays, **changes}.items() if array is not None}
    np.savez(tmp_path / "data.npz", **arrays)
    with pytest.raises(BadData, match=message):
        captured(tmp_path / "data.npz", PRESETS["tiny"], 2, 0)
