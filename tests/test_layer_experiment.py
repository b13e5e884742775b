"""The whole layer's experiment: problems, selection, oracle, contenders, faults."""

import re
import shlex
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from experiments import layer_bench, layer_contenders, layer_cost, layer_problems
from experiments import layer_oracle as oracle_module
from experiments.layer_check import ALLOWED, judge
from experiments.layer_problems import Problem, decodes, prefills
from experiments.layer_selection import LayerSelection, plan_work
from experiments.plan import BadOption
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
        flags = {"gate": True, "max_autotune": True}
        selection = LayerSelection(gpu=False, dims="kimi_linear", tp_size=2, seed=3, **flags)
        work, _ = plan_work(selection)
        for made, names in work:
            for name in names:
                words = shlex.split(selection.command(made, name))
                words.remove("--gate")
                words.remove("--max-autotune")
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
                    **flags,
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

    @pytest.mark.parametrize(("off", "status"), [(1e-4, "PASSED"), (3e-4, "WRONG")])
    def test_no_element_may_be_far_off_however_near_the_others_are(self, off, status):
        made = problem("5+9", dims=replace(TINY, hidden_size=512))
        held = layer_bench.bench(made, False, None)
        out = held.expected.out.copy()
        out[3, 5] += off * np.sqrt((out[3] ** 2).mean())
        found = judge(held.inputs, out.astype(np.float32), held.expected, False)
        assert found.rms_error < ALLOWED["float32"][0]
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
        assert found["status"] == "ERROR"
        said = r"RuntimeError: an illegal address \(test_layer_experiment.py:\d+, in fails\)"
        assert re.fullmatch(said, found["message"])
        found = checked(problem(), planted(monkeypatch, "gather", runs_out))
        assert (found["status"], found["message"]) == ("UNAVAILABLE", "out of memory: 9 GB")
        assert checked(problem())["status"] == "PASSED"
