"""What a comparison runs: ops, dims, dtypes, formats, batches."""

import json
import shlex

import pytest
from typer.testing import CliRunner

from experiments import plan
from experiments.__main__ import app
from experiments.plan import Planner, Selection
from sandbox.cache_formats import FORMATS
from sandbox.dims import PRESETS
from sandbox.kernels import OPS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_op"], "no op 'no_such_op'"),
        (["--variants", "no_such"], "no variant matches 'no_such'"),
        (["--target", "tpu"], "'tpu'"),
        (["--dims", "gpt2"], "no such preset"),
        (["--dims", "Q=4"], "expected letters"),
        (["--dims", "R=3"], "even number"),
        (["--dtype", "int32"], "'int32': expected float32, float16, bfloat16"),
        (["--dtype", "uint8"], "'uint8': expected float32, float16, bfloat16"),
        (["--format", "fp4"], "'fp4': expected float32"),
        (["--format", "fp8_ds_mla", "--dims", "tiny", "gather"], "L must be a multiple of 128"),
        (["--format", "bfloat16", "dequantize_context"], "dequantize_context has no bfloat16"),
        (["--checked", "--target", "cpu"], "--checked is for the host runner"),
        (["--trace", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--case", "no such case"], "nothing to run"),
    ],
)
def test_bad_options_are_named(arguments, message):
    found = CliRunner().invoke(app, ["compare", *arguments], env={"COLUMNS": "500"})
    assert found.exit_code == 2
    assert message in found.output


def test_dims_and_dtype_replace_those_of_the_cases():
    name, dims = plan.parse_dims("kimi_k2,N=8,L=256")
    assert name == "kimi_k2_N8_L256"
    assert (dims.N, dims.L, dims.R) == (8, 256, 64)
    assert plan.parse_dims("tiny") == ("tiny", PRESETS["tiny"])
    planner = Planner(Selection(dims="N=8,L=256", dtype="fp16", batches=2), ["host"])
    problems = planner.problems(OPS["gather"])
    assert {p.case.dims.L for p in problems} == {256}
    assert {p.case.dtype.name for p in problems} == {"float16"}
    assert all(p.altered for p in problems)
    names = [p.case.name for p in problems]
    assert len(names) == len(set(names))


def test_batches_are_scaled_for_the_cpu_and_whole_on_a_gpu():
    on_cpu = Planner(Selection(), ["host", "sim", "cpu"]).problems(OPS["concat_insert_decode"])
    scaled = [p for p in on_cpu if p.scaled]
    assert {p.case.size for p in scaled} == {"small", "medium"}
    assert all(p.case.workload.context_tokens <= 2048 for p in scaled)
    on_gpu = Planner(Selection(), ["gpu"]).problems(OPS["concat_insert_decode"])
    batches = [p for p in on_gpu if "generated" in p.case.name]
    assert len(batches) == 4
    assert not any(p.scaled for p in batches)
    assert max(p.case.workload.context_tokens for p in batches) > 100_000
    asked = Planner(Selection(scale=100), ["gpu"]).problems(OPS["concat_insert_decode"])
    assert all("div100" in p.case.name for p in asked if "generated" in p.case.name)


def test_a_trace_replaces_the_cases_of_the_op(tmp_path):
    path = tmp_path / "t.jsonl"
    line = {"timestamp": 0, "input_length": 700, "output_length": 3, "hash_ids": [1, 2]}
    again = {"timestamp": 99, "input_length": 900, "output_length": 3, "hash_ids": [1, 3]}
    path.write_text(f"{json.dumps(line)}\n{json.dumps(again)}\n")
    planner = Planner(Selection(trace=path, batches=9), ["gpu"])

    def contexts(op):
        return {p.case.workload.context_lens for p in planner.problems(OPS[op])}

    assert contexts("gather") == {(512,)}
    assert contexts("concat_insert_decode") == {(700,), (701,)}


def problems(op, *targets, **options):
    return Planner(Selection(**options), targets or ["host", "sim", "cpu"]).problems(OPS[op])


@pytest.mark.parametrize("name", ["fp8_ds_mla", "int4_per_token", "bfloat16"])
@pytest.mark.parametrize("op", ["gather", "concat_insert", "concat_insert_prefill_fp8"])
def test_a_format_is_that_of_every_case_and_batch(op, name):
    found = problems(op, "gpu", format=name)
    assert {p.case.format.name for p in found} == {name}
    batches = [p.case for p in found if "generated" in p.case.name]
    assert len(batches) > 1
    for case in batches:
        assert case.dtype.name == "bfloat16"
        assert case.options.get("format", "bfloat16") == name


def test_several_formats_and_all_of_them():
    two = problems("gather", "gpu", format="fp8_e5m2,int8_per_token")
    assert {p.case.format.name for p in two} == {"fp8_e5m2", "int8_per_token"}
    everything = problems("gather", "gpu", format="all")
    own = [p for p in problems("gather", "gpu") if "generated" not in p.case.name]
    assert {p.case.name for p in own} < {p.case.name for p in everything}
    batches = [p.case.format.name for p in everything if "generated" in p.case.name]
    assert set(batches) == set(FORMATS)


def test_ops_without_formats_and_their_own_defaults_stay():
    assert problems("lse_merge", format="fp8_e4m3") == problems("lse_merge")
    for op in ("dequantize_context", "concat_insert_prefill_fp8"):
        batches = [p.case for p in problems(op) if "generated" in p.case.name]
        assert {case.format.name for case in batches} == {"fp8_e4m3"}


def test_a_plain_format_and_another_dtype_leave_nothing():
    assert problems("gather", format="float16", dtype="bfloat16") == []
    halves = problems("gather", format="float16", dtype="float16")
    assert {p.case.dtype.name for p in halves} == {"float16"}
    packed = problems("gather", format="fp8_e4m3", dtype="float16")
    assert {(p.case.dtype.name, p.case.format.name) for p in packed} == {("float16", "fp8_e4m3")}


def test_formats_that_the_dims_have_no_layout_for_are_left_out_and_said_once():
    planner = Planner(Selection(format="all", dims="L=510,R=6"), ["host", "sim"])
    for op in OPS.values():
        for problem in planner.problems(op):
            assert not problem.case.format.refuses(problem.case.dims)
            assert OPS[op.name].cost(problem.case).bytes >= 0
    refused = {reason.split(" has")[0]: reason for reason in planner.left_out}
    assert set(refused) == {"fp8_ds_mla", "int4_per_token"}
    assert len(planner.left_out) == len(refused)


def test_the_command_of_a_row_keeps_what_decides_it():
    selection = Selection(format="fp8_e4m3,fp8_ds_mla", checked=True, dims="tiny", quick=True)
    words = shlex.split(selection.command("gather", "case", "raw_tile", "host"))
    assert words[:3] == ["python", "-m", "experiments"]
    assert words[words.index("--format") + 1] == "fp8_e4m3,fp8_ds_mla"
    assert words[words.index("--dims") + 1] == "tiny"
    assert {"--checked", "--quick"} <= set(words)
    plain = Selection().command("gather", "case", "raw_tile", "host")
    assert "--format" not in plain
    assert "--checked" not in plain
