"""The whole layer's experiment: oracle, contenders, times, tables, command line."""

import json
import shlex
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from numpy_as_cupy import NumpyAsCupy
from typer.testing import CliRunner

from experiments import layer_bench, layer_contenders, layer_cost, layer_problems, layer_rows
from experiments import layer_oracle as oracle_module
from experiments.__main__ import app
from experiments.layer_check import judge
from experiments.layer_problems import Problem, decodes, prefills
from experiments.layer_rows import LayerRow
from experiments.layer_selection import LayerSelection, plan_work
from experiments.layer_stages import ATTENTION_AND_GEMMS, STAGES, attention_and_gemm_percent
from experiments.plan import BadOption
from experiments.results import read_rows
from sandbox.cache_formats import FORMATS
from sandbox.dims import PRESETS
from sandbox.kernels import OPS
from sandbox.kernels.op import Variant

TINY = PRESETS["tiny"]


def problem(shape="5+9", fmt="float32", dims=TINY, **changes):
    made = prefills(shape) if "+" in shape else decodes(shape)
    settings = {"dtype": "float32", "block_size": 4, "workspace_rows": 8} | changes
    return Problem(made[0], dims, "tiny", cache_format=fmt, **settings)


def checked(made, name="layer"):
    return layer_bench.check(lambda stage: None, made, name, False)


def planted(monkeypatch, op, run):
    """A variant of the op that runs `run` with what the reference would get."""
    known = OPS[op]
    known.variants  # noqa: B018  (imports the files first)
    monkeypatch.setitem(known._variants, "planted", Variant(known, "planted", "numpy", run))
    layer_bench._held.clear()
    return f"layer[{op}=planted]"


class TestProblems:
    def test_shapes_are_read_from_text(self):
        one, other = prefills("2048+0, 5+9")
        assert (one.name, one.new_tokens, one.pairs) == ("prefill_2048+0", 2048, 2048 * 2049 // 2)
        assert (other.context, other.pairs) == (9, 10 + 11 + 12 + 13 + 14)
        (batch,) = decodes("32x4096")
        assert (batch.name, batch.new_tokens, batch.pairs) == ("decode_32x4096", 32, 32 * 4097)
        assert prefills("none") == decodes("") == []

    @pytest.mark.parametrize("text", ["5", "5x9", "a+1", "1+5", "5+9,"])
    def test_what_is_no_prefill_is_refused(self, text):
        with pytest.raises(ValueError, match=r"prefill|expected"):
            prefills(text)

    def test_default_swaps_are_variants_of_ops_that_some_step_runs(self):
        steps = [problem(shape, gate=gate).ops() for shape in ("5+9", "2x6") for gate in (0, 1)]
        for swap in layer_problems.SWAPS:
            op, variant = swap.split("=")
            assert variant in OPS[op].variants
            assert any(op in ops for ops in steps)
        shapes = prefills(layer_problems.PREFILLS[True]) + decodes(layer_problems.DECODES[True])
        assert {shape.name for shape in shapes} >= set(layer_problems.SWAPPED)

    @pytest.mark.parametrize("fmt", ["float32", "fp8_e4m3", "int8_per_token"])
    def test_contexts_are_what_the_cache_restores_to_and_all_else_is_unwritten(self, fmt):
        made = problem("3x7", fmt)
        inputs = layer_problems.make_inputs(made, {}, np)
        rows = np.stack([inputs.context(request) for request in range(3)])
        assert rows.shape == (3, 7, TINY.E)
        assert abs(rows.std() - 1) < 0.1
        assert len(np.unique(rows[..., 0])) > 15, "requests have contexts of their own"
        written = ~(inputs.cache.view(np.uint8) == 0xFF).all(axis=2)
        assert written.sum() == 3 * 7
        assert len(set(inputs.slots)) == 3
        assert not written.reshape(-1)[inputs.slots].any()

    def test_a_steps_cost_is_that_of_the_papers_formulas(self):
        dims = PRESETS["deepseek_v3"]
        weights = 7168 * 1536 + 1536 * 24576 + 7168 * 576 + 512 * 32768 + 16384 * 7168 + 1536 + 512
        made = Problem(decodes("128x4096")[0], dims, "v3", "bfloat16", "fp8_ds_mla")
        cost = layer_cost.step_cost(made)
        assert layer_cost.weight_bytes(made) == 2 * weights
        hidden = 128 * 7168 * 2
        assert cost.bytes_read == 2 * weights + 128 * 4096 * 656 + hidden
        assert cost.bytes_written == 128 * 656 + hidden
        attention = 2 * 128 * (576 + 512) * 128 * 4097
        assert cost.flops == 2 * 128 * (weights - 1536 - 512) + attention
        made = Problem(prefills("2048+8192")[0], dims, "v3", "bfloat16", "bfloat16")
        pairs = 2048 * 8192 + 2048 * 2049 // 2
        up = 512 * 32768
        expected = 2048 * (weights - 1536 - 512) + 8192 * up + pairs * 128 * (192 + 128)
        assert layer_cost.step_cost(made).flops == 2 * expected


class TestSelection:
    def test_references_run_for_the_plain_cache_alone(self):
        work, left_out = plan_work(LayerSelection(gpu=True))
        assert left_out == []
        assert len(work) == 10 * 3
        for made, names in work:
            assert ("torch_compiled" in names) == ("huggingface" in names) == made.plain
            swaps = [name for name in names if "=" in name]
            assert bool(swaps) == (made.plain and made.shape.name in layer_problems.SWAPPED)
            for name in swaps:
                assert next(iter(layer_contenders.variants_of(name))) in made.ops()

    def test_asked_for_swaps_run_wherever_the_op_does(self):
        options = {"gpu": True, "prefill": "64+0,64+128", "decode": "2x64", "quick": True}
        work, _ = plan_work(LayerSelection(**options, swaps=("gather=torch", "rms_norm=torch")))
        swaps = {made.shape.name: [n for n in names if "=" in n] for made, names in work}
        assert swaps == {
            "prefill_64+0": ["layer[rms_norm=torch]"],
            "prefill_64+128": ["layer[gather=torch]", "layer[rms_norm=torch]"],
            "decode_2x64": ["layer[rms_norm=torch]"],
        }

    def test_formats_without_a_layout_are_left_out_in_words(self):
        work, left_out = plan_work(LayerSelection(gpu=False, dims="tiny"))
        assert {made.cache_format for made, _ in work} == {"float32", "fp8_e4m3"}
        assert left_out == [
            "fp8_ds_mla has no layout for tiny: L must be a multiple of 128, the values of a tile"
        ]

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"swaps": ("gather=nope",)}, "no such variant, only reference"),
            ({"swaps": ("nope=torch",)}, "expected op=variant"),
            ({"formats": "bfloat16"}, "its own float32"),
            ({"contenders": "everyone"}, "expected layer, swaps"),
            ({"tp_size": 7}, "cannot be divided over 7"),
            ({"workspace": 3}, "at least a block of 4 rows"),
            ({"decode": "4096"}, "--decode"),
        ],
    )
    def test_bad_options_are_named(self, options, said):
        with pytest.raises(BadOption, match=said):
            plan_work(LayerSelection(gpu=False, dims="tiny", **options))

    def test_a_rows_command_selects_that_row_alone(self):
        selection = LayerSelection(gpu=False, dims="kimi_linear", gate=True, tp_size=2, seed=3)
        work, _ = plan_work(selection)
        for made, names in work:
            for name in names:
                words = shlex.split(selection.command(made, name))
                words.remove("--gate")
                given = dict(zip(words[4::2], words[5::2]))
                again = LayerSelection(
                    gpu=False,
                    dims=given["--dims"],
                    dtype=given["--dtype"],
                    prefill=given["--prefill"],
                    decode=given["--decode"],
                    formats=given["--format"],
                    contenders=given["--contenders"],
                    swaps=tuple(filter(None, [given.get("--swap")])),
                    gate=True,
                    tp_size=int(given["--tp-size"]),
                    block_size=int(given["--block-size"]),
                    workspace=int(given["--workspace"]),
                    seed=int(given["--seed"]),
                )
                ((same, found),) = plan_work(again)[0]
                assert same == made
                assert found[-1] == name


class TestContenders:
    @pytest.mark.parametrize("shape", ["5+0", "5+9", "60+9", "3x40"])
    def test_layer_and_references_agree_with_the_oracle(self, shape):
        for name in ("layer", "torch_compiled", "huggingface"):
            found = checked(problem(shape), name)
            assert found["status"] == "PASSED", (name, found["message"])
            assert found["rms_error"] < 3e-6, name
            assert ("transformers" in found["note"]) == (name == "huggingface")

    @pytest.mark.parametrize("shape", ["5+9", "2x6"])
    def test_without_rope_and_with_a_gate(self, shape):
        made = problem(shape, dims=replace(TINY, rope=False, q_lora_rank=None), gate=True)
        assert checked(made)["rms_error"] < 3e-6
        assert checked(made, "torch_compiled")["rms_error"] < 3e-6
        refused = checked(made, "huggingface")
        assert (refused["status"], refused["error"]) == ("UNAVAILABLE", None)
        assert "without RoPE" in refused["message"]

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_halves_pass_with_room_to_spare_in_every_format(self, dtype):
        for fmt in FORMATS.values():
            if (fmt.packed or fmt.name == dtype) and not fmt.refuses(TINY):
                for shape in ("5+9", "2x6"):
                    found = checked(problem(shape, fmt.name, dtype=dtype))
                    assert found["status"] == "PASSED", (fmt.name, found["message"])
                    assert found["error"] < 0.6

    def test_the_oracle_projects_up_or_absorbs_with_one_result(self, monkeypatch, rng):
        q, rows = rng.standard_normal((6, 3, 32)), rng.standard_normal((11, 48))
        kv_b = rng.standard_normal((3, 40, 40))
        absorbed = oracle_module._attention(np, q, rows, kv_b, 24, 0.2)
        many = np.concatenate([np.zeros((94, 3, 32)), q])
        longer = np.concatenate([rng.standard_normal((94, 48)), rows])
        shifted = oracle_module._attention(np, q, longer, kv_b, 24, 0.2)
        projected = oracle_module._attention(np, many, longer, kv_b, 24, 0.2)
        np.testing.assert_allclose(projected[94:], shifted, rtol=1e-10)
        k = np.einsum("npl,tl->ntp", kv_b[:, :24], rows[:, :40])
        k = np.concatenate([k, np.broadcast_to(rows[:, 40:], (3, 11, 8))], axis=-1)
        weights = np.exp(0.2 * np.einsum("nd,ntd->nt", q[5], k))
        weights /= weights.sum(axis=1, keepdims=True)
        v = np.einsum("nvl,tl->ntv", kv_b[:, 24:], rows[:, :40])
        np.testing.assert_allclose(absorbed[5], np.einsum("nt,ntv->nv", weights, v), rtol=1e-10)

    def test_older_transformers_get_projected_keys_and_values(self):
        torch = pytest.importorskip("torch")
        from experiments.torch_huggingface_layer import ContextCache, attention_module

        held = layer_bench.bench(problem("2x6"), False, None)
        cache = ContextCache(held.inputs, attention_module(held.inputs))
        new = torch.ones(2, 3, 1, 32), torch.full((2, 3, 1, 16), 2.0)
        keys, values = cache.update(*new, 0, {"cos": None})
        assert cache.keeps == "projected keys and values"
        assert (keys[:, :, 6:] == 1).all()
        assert (values[:, :, 6:] == 2).all()
        rows = np.stack([held.inputs.context(request) for request in range(2)])
        k_nope = np.einsum("npl,btl->bntp", held.weights.w_uk, rows[..., :40])
        v = np.einsum("nvl,btl->bntv", held.weights.w_uv, rows[..., :40])
        np.testing.assert_allclose(keys[:, :, :6, :24], k_nope, atol=2e-6)
        np.testing.assert_allclose(values[:, :, :6], v, atol=2e-6)
        halves = np.concatenate([rows[..., 40::2], rows[..., 41::2]], axis=-1)
        np.testing.assert_array_equal(keys[:, 1, :6, 24:], halves)

    def test_what_would_not_fit_is_said_before_it_is_tried(self, monkeypatch):
        torch = pytest.importorskip("torch")
        from experiments import torch_huggingface_layer, torch_layer_reference

        big = Problem(decodes("128x32768")[0], PRESETS["deepseek_v3"], "v3", "bfloat16", "bfloat16")
        small = replace(big, shape=decodes("128x4096")[0])
        assert torch_huggingface_layer.estimated_bytes(big) > 500e9
        assert 50e9 < torch_huggingface_layer.estimated_bytes(small) < 120e9
        assert 4e9 < torch_layer_reference.estimated_bytes(big) < 10e9
        long = replace(big, shape=prefills("8192+32768")[0])
        assert 4e9 < torch_layer_reference.estimated_bytes(long) < 10e9
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(layer_contenders, "free_bytes", lambda: 120_000_000_000)
        on_gpu = SimpleNamespace(problem=big, xp=None)
        with pytest.raises(
            layer_contenders.Unavailable, match=r"about \d+\.\d GB .* 120\.0 GB are"
        ):
            layer_contenders.make("huggingface", on_gpu, None, None)


class TestFaults:
    def test_a_wrong_variant_is_wrong(self, monkeypatch):
        right = OPS["gather"].variants["reference"].run

        def loses_a_row(**arguments):
            right(**arguments)
            arguments["out"][-1] = 0

        found = checked(problem(), planted(monkeypatch, "gather", loses_a_row))
        assert found["status"] == "WRONG"
        assert found["error"] > 1
        assert "rms error" in found["message"]

    def test_so_is_one_that_writes_nothing_to_the_cache(self, monkeypatch):
        right = OPS["concat_insert_prefill"].variants["reference"].run

        def inserts_elsewhere(**arguments):
            right(**arguments | {"cache": arguments["cache"].copy()})

        name = planted(monkeypatch, "concat_insert_prefill", inserts_elsewhere)
        for fmt in ("float32", "fp8_e4m3"):
            found = checked(problem("5+9", fmt), name)
            assert (found["status"], found["rms_error"] < 1e-5) == ("WRONG", True)
            assert "the cache row of token 0" in found["message"]
        assert checked(problem("5+9", "fp8_e4m3"))["status"] == "PASSED"

    @pytest.mark.parametrize(("factor", "status"), [(1.0, "PASSED"), (1.02, "WRONG")])
    def test_outputs_may_be_off_by_roundings_only(self, factor, status):
        held = layer_bench.bench(problem("5+9", "bfloat16", dtype="bfloat16"), False, None)
        rng = np.random.default_rng(1)
        out = held.expected.out * factor
        out *= 1 + 0.012 * rng.standard_normal(out.shape)
        found = judge(held.inputs, out.astype(held.inputs.hidden.dtype), held.expected, False)
        assert found.status == status

    def test_nan_is_wrong(self):
        held = layer_bench.bench(problem(), False, None)
        out = held.expected.out.copy()
        out[3, 5] = np.nan
        found = judge(held.inputs, out, held.expected, False)
        assert (found.status, found.error) == ("WRONG", np.inf)
        assert found.message == f"1 of {out.size} outputs are NaN or infinite"

    def test_a_failure_is_its_own_contenders(self, monkeypatch):
        def fails(**arguments):
            raise RuntimeError("an illegal address\nand more")

        def runs_out(**arguments):
            raise type("OutOfMemoryError", (Exception,), {})("9 GB")

        found = checked(problem(), planted(monkeypatch, "gather", fails))
        assert (found["status"], found["message"]) == ("ERROR", "RuntimeError: an illegal address")
        found = checked(problem(), planted(monkeypatch, "gather", runs_out))
        assert (found["status"], found["message"]) == ("UNAVAILABLE", "out of memory: 9 GB")
        assert checked(problem())["status"] == "PASSED"


@pytest.fixture
def timing(monkeypatch):
    pytest.importorskip("cupy")
    from experiments import gpu_timing, gpu_work, layer_timing

    small_l2 = SimpleNamespace(l2_bytes=10_000)
    monkeypatch.setattr(layer_timing, "device_info", lambda: small_l2)
    monkeypatch.setattr(gpu_timing.Filler, "BYTES", 64)
    monkeypatch.setattr(gpu_timing.measure, "MAX_ROUNDS", 20)
    for module in (gpu_timing, gpu_work, layer_timing):
        monkeypatch.setattr(module, "cp", NumpyAsCupy(20.0))
    for module in (gpu_timing, gpu_work):
        monkeypatch.setattr(module, "copy_bytes", lambda target, source: None)
    layer_bench._held.clear()
    return layer_timing


def timed_on_stream(timing, made, names):
    held = layer_bench.bench(made, False, None)
    return timing.time_on_stream(held, names, np.zeros(64, np.uint8), 9.0, lambda stage: None)


class TestTiming:
    def test_steps_and_stages(self, timing, monkeypatch):
        from experiments import gpu_timing

        capture = gpu_timing.captured

        def only_copies(name, calls, launches):
            if name == "copy":
                return capture(name, calls, launches)
            assert launches == 1
            raise RuntimeError("no capture here")

        monkeypatch.setattr(gpu_timing, "captured", only_copies)
        names = ["layer", "layer[gather=torch]", "torch_compiled"]
        found = timed_on_stream(timing, problem("5+9"), names)
        assert found["wrong"] == {}
        assert list(found["timings"]) == names
        for columns in found["timings"].values():
            assert columns["samples_us"] == [20.0] * 20
            assert (columns["method"], columns["l2"], columns["launches"]) == ("eager", "cold", 1)
            assert columns["copy_us"] == 20.0 / 50, "fifty copies a replay"
            assert "cannot be captured" in columns["note"]
        assert set(found["stages"]) == set(names[:2])
        stages = found["stages"]["layer"]
        assert set(stages) <= set(STAGES)
        assert stages["output projection"] == 20.0
        assert stages["merge"] == stages["gather"] == 2 * 20.0, "two chunks of context"
        assert stages["prefill attention"] == 3 * 20.0
        layer = layer_bench.bench(problem("5+9"), False, None).contender("layer", str).layer
        assert layer.overlap_tokens > 0
        assert layer.on_stage("anything") is None

    def test_a_graph_that_computes_nothing_has_no_time(self, timing):
        found = timed_on_stream(timing, problem("2x6"), ["layer"])
        assert found["timings"] == {}
        assert "NaN" in found["wrong"]["layer"]


def gpu_row(name, shape="32x4096", **changes):
    made = Problem(
        decodes(shape)[0] if "x" in shape else prefills(shape)[0],
        PRESETS["deepseek_v3"],
        "deepseek_v3",
        "bfloat16",
        "bfloat16",
    )
    row = layer_rows.blank(made, name, True, "python -m experiments layer")
    return replace(row, status="PASSED", error=0.2, workspace_bytes=5_000_000, **changes)


def answer(**medians):
    columns = {"launches": 1, "sets": 1, "l2": "cold", "method": "graph"}
    timings = {
        name: {**columns, "samples_us": (us - 1, us, us + 1), "copy_us": 100.0, "note": ""}
        for name, us in medians.items()
    }
    stages = {"projections": 60.0, "insert": 10.0, "decode attention": 130.0}
    return {"timings": timings, "stages": {"layer": stages}}


MEDIANS = {"layer": 200.0, "layer[rms_norm=torch]": 220.0, "torch_compiled": 500.0}


def timed(changes=()):
    rows = [replace(gpu_row(name), **dict(changes).get(name, {})) for name in MEDIANS]
    return layer_rows.timed(rows, answer(**MEDIANS), 800.0)


class TestRows:
    def test_what_follows_from_a_time(self):
        layer, swap, compiled = timed()
        assert (layer.speedup, swap.speedup, compiled.speedup) == (1.0, 200 / 220, 0.4)
        assert layer.tokens_per_s == pytest.approx(32 / 200e-6)
        assert layer.attention_and_gemm_percent == pytest.approx(95.0)
        assert layer.limit_by == "memory"
        assert layer.percent_of_limit == pytest.approx(50.0)
        assert [row.rank for row in (layer, swap, compiled)] == [1, 2, 3]
        assert compiled.stages_us == {}

    def test_no_time_for_what_is_wrong(self):
        layer, swap, _ = timed({"layer": {"status": "WRONG"}})
        assert layer.median_us is layer.tokens_per_s is layer.attention_and_gemm_percent is None
        assert layer.stages_us == {}
        assert swap.median_us == 220.0
        assert swap.speedup is None

    def test_tables_say_where_a_swap_matters(self):
        from experiments import layer_tables, tables

        rows = timed()
        lines = [line for _, line in tables.text_lines("layer", rows, columns=columns(rows))]
        assert max(map(len, lines)) <= 150
        assert any("torch_compiled" in line and "0.400" in line for line in lines)
        said = dict(layer_tables.sections(rows))
        swaps, stages, memory = said.values()
        assert swaps == ["layer[rms_norm=torch]: 1.10x on decode_32x4096-bfloat16"]
        assert stages == [
            "decode_32x4096-bfloat16, 95% in attention and GEMMs: projections 60.0 (30%), "
            "insert 10.0 (5%), decode attention 130 (65%)"
        ]
        assert memory == [
            "weights 374 MB; cache + workspace: decode_32x4096-bfloat16 151 + 5.00 MB"
        ]

    def test_pictures_and_page(self, tmp_path):
        from experiments import layer_plots, layer_report, report

        rows = timed()
        made = layer_plots.plot(rows, tmp_path)
        assert [path.name for path in made] == [
            "layer_times.png",
            "layer_correctness.png",
            "layer_swaps_times.png",
            "layer_swaps_correctness.png",
            "layer_stages.png",
        ]
        found = {"gpu": {"name": "H200"}, "date": "", "commit": "abc", "dirty": False}
        report.write(tmp_path / "report.html", rows, found, made, layer_report.PAGE)
        page = (tmp_path / "report.html").read_text()
        assert page.count("data:image/png") == 5
        assert "1.10x on decode_32x4096" in page
        assert "<title>The whole MLA layer</title>" in page

    def test_share_of_attention_and_gemms(self):
        assert set(STAGES) > ATTENTION_AND_GEMMS
        assert attention_and_gemm_percent({}) is None
        assert attention_and_gemm_percent({"norm": 1.0, "absorb": 3.0}) == 75.0


def columns(rows):
    from experiments import layer_tables

    return layer_tables.columns_for(rows)


PLANTED = '''
import os
from sandbox.kernels import OPS
right = OPS["decode_attention"].variants["reference"].run

@OPS["decode_attention"].variant("planted_wrong", kind="numpy")
def planted_wrong(**arguments):
    """Forgets the last key."""
    seq_lens = arguments["seq_lens"] - 1
    right(**arguments | {"seq_lens": seq_lens})

@OPS["decode_attention"].variant("planted_exit", kind="numpy")
def planted_exit(**arguments):
    """Leaves."""
    os._exit(3)
'''


def test_the_command(tmp_path):
    (tmp_path / "planted.py").write_text(PLANTED)
    command = ["layer", "--dims", "tiny", "--prefill", "none", "--format", "float32"]
    command += ["--contenders", "layer", "--out", str(tmp_path / "run")]
    command += ["--variant-file", str(tmp_path / "planted.py")]
    for swap in ("planted_wrong", "planted_exit"):
        command += ["--swap", f"decode_attention={swap}"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1, done.output
    rows = read_rows(tmp_path / "run", LayerRow)
    assert {row.variant: row.status for row in rows} == {
        "layer": "PASSED",
        "layer[decode_attention=planted_wrong]": "WRONG",
        "layer[decode_attention=planted_exit]": "ERROR",
    }
    assert all(row.median_us is None and row.samples_us == () for row in rows)
    assert all(row.stages_us == {} for row in rows)
    assert "exit code 3" in rows[2].message
    assert "WRONG layer layer[decode_attention=planted_wrong] on cpu" in done.output
    assert rows[1].reproduce in done.output
    assert "median" not in done.output, "no time is shown"
    names = {path.name for path in (tmp_path / "run").iterdir()}
    expected = {"rows.jsonl", "fingerprint.json", "table.txt", "table.md", "report.html"}
    assert names == expected | {"layer_correctness.png", "layer_swaps_correctness.png"}
    found = json.loads((tmp_path / "run" / "fingerprint.json").read_text())
    assert found["packages"]["transformers"]
    assert found["bf16_gemm_tflop_per_s"] is None
