"""Any choice of variants gives the same layer; a layer says which it cannot run."""

from collections import defaultdict

import pytest
from layer_models import Server, assert_close, put_all, sequences
from variants_here import unless

from sandbox import MLADims
from sandbox.kernels import OPS, Unavailable
from sandbox.kernels.op import Op
from sandbox.layers import InProcess, MLALayer, Rope, random_weights
from sandbox.planner import ContextParallel

DIMS = MLADims(4, 56, 40, 24, 8, 16, q_lora_rank=20)
USED = [name for name in OPS if name != "concat_insert"]
SPREAD = ["lse_merge_k", "dequantize_context"]
"""Ops for contexts over ranks."""
CODED = {"prefill_descales": (0.011, 0.013, 0.017), "decode_q_descale": 0.03}
OPTIONS = {
    "concat_insert_prefill_fp8": CODED,
    "concat_context_fp8": CODED,
    "quantize_static": {"output_quant": "fp8_static", "output_scale": 0.01},
    "quantize_groups": {"output_quant": "fp8_group_64"},
    "quantize_nvfp4": {"output_quant": "nvfp4", "output_scale": 0.01},
}
"""What a layer must be told to use the op at all."""
BOUNDS = {"float32": 1e-5, "bfloat16": 0.06}


def choices(gpu):
    """Every variant of the ops that a layer uses, with why it cannot run on this target."""
    for name in USED:
        for variant in OPS[name].variants.values():
            reason = variant.unavailable(variant.target(gpu=gpu))
            marks = [pytest.mark.gpu] * gpu + unless(reason)
            yield pytest.param(name, variant.name, id=f"{name}={variant.name}", marks=marks)


@pytest.fixture
def chosen(monkeypatch):
    """Names of the variants that ran, by the name of their op."""
    names = defaultdict(set)
    choose = Op.choose

    def seen(op, variant, arguments):
        found = choose(op, variant, arguments)
        names[op.name].add(found.name)
        return found

    monkeypatch.setattr(Op, "choose", seen)
    return names


def serve(target, dtype, variants, **options):
    weights = random_weights(DIMS, dtype, output_gate=True, seed=5)
    layer = MLALayer(
        DIMS,
        put_all(weights, target),
        rope=Rope.default(DIMS.R, 64),
        output_gate=True,
        variants=variants,
        **options,
    )
    hidden = sequences((7, 13, 4), dtype=weights["o_proj.weight"].dtype)
    server = Server(layer, hidden, target, workspace_rows=4)
    server.step([4, 8, 1])
    server.step([2, 4, 1])
    server.step([1, 1, 2])
    return server.results()


def serve_spread(target, dtype, variants, **options):
    """On two ranks, the second without the variants: simulators of kernels know one thread."""
    parallel = ContextParallel(2, block_size=4)

    def run(collective):
        mine = {} if collective.rank else variants
        spread = {"context_parallel": parallel, "collective": collective}
        return serve(target, dtype, mine, **spread, **options)

    return InProcess(2).run(run)[0]


def check(target, op, variant, chosen):
    """Over a plain cache, and in 16 bits over a packed one; a simulated kernel over one of them."""
    run = serve_spread if op in SPREAD else serve
    problems = [("float32", None), ("bfloat16", "fp8_e4m3"), ("bfloat16", None)]
    if op == "dequantize_context":
        problems = [("float32", "fp8_e4m3"), ("bfloat16", "fp8_e4m3")]
    ran, reason = 0, ""
    for dtype, cache_format in problems:
        options = OPTIONS.get(op, {})
        if cache_format:
            options = options | {"cache_format": cache_format, "k_scale": 0.02}
        want = run(target, dtype, {}, **options)
        others = chosen.pop(op) if op in SPREAD else set()
        chosen.clear()
        try:
            got = run(target, dtype, {op: variant}, **options)
        except Unavailable as refusal:
            reason = str(refusal)
            continue
        assert chosen[op] | others == {variant} | others
        coded = OPTIONS.get(op) is CODED
        assert_close(got, want, 0.3 if coded or cache_format else BOUNDS[dtype])
        ran += 1
        if ran == 2 or (target == "numpy" and variant.startswith("numba")):
            return
    if not ran:
        pytest.skip(reason)


@pytest.mark.parametrize(("op", "variant"), [*choices(gpu=False)])
def test_a_variant_gives_the_same(op, variant, chosen):
    check("numpy", op, variant, chosen)


@pytest.mark.parametrize(("op", "variant"), [*choices(gpu=True)])
def test_a_variant_gives_the_same_on_a_gpu(op, variant, chosen):
    check("cupy", op, variant, chosen)
