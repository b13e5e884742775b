"""Any choice of variants gives the same layer; a layer says which it cannot run."""

import pytest
from layer_models import Server, assert_close, on_gpu, put_all, sequences

from sandbox import MLADims
from sandbox.kernels import OPS, Unavailable
from sandbox.layers import MLALayer, Rope, random_weights

DIMS = MLADims(3, 56, 40, 24, 8, 16, q_lora_rank=20)
USED = [
    "gather",
    "concat_insert_prefill",
    "concat_insert_decode",
    "concat_context",
    "lse_merge",
    "prefill_attention",
    "decode_attention",
    "rms_norm",
    "sigmoid_gate",
    "linear",
]
CODED = ["concat_insert_prefill_fp8", "concat_context_fp8"]
BOUNDS = {"float32": 1e-5, "bfloat16": 0.06}


def choices(gpu):
    """Every variant of the ops that a layer uses, with why it cannot run on this target."""
    for name in USED + CODED:
        for variant in OPS[name].variants.values():
            reason = variant.unavailable(variant.target(gpu=gpu))
            marks = on_gpu if gpu else []
            if reason:
                marks = [*marks, pytest.mark.skip(reason=reason)]
            yield pytest.param(name, variant.name, id=f"{name}={variant.name}", marks=marks)


def serve(target, dtype, variants, coded=False, cache_format=None):
    weights = random_weights(DIMS, dtype, output_gate=True, seed=5)
    options = {"prefill_descales": (0.011, 0.013, 0.017), "decode_q_descale": 0.03} if coded else {}
    if cache_format:
        options |= {"cache_format": cache_format, "k_scale": 0.02}
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


def check(target, op, variant):
    """Over a plain cache, and in 16 bits over a packed one; a simulated kernel over one of them."""
    coded = op in CODED
    problems = [("float32", None), ("bfloat16", "fp8_e4m3"), ("bfloat16", None)]
    ran, reason = 0, ""
    for dtype, cache_format in problems:
        try:
            got = serve(target, dtype, {op: variant}, coded, cache_format)
        except Unavailable as refusal:
            reason = str(refusal)
            continue
        want = serve(target, dtype, {}, coded, cache_format)
        assert_close(got, want, 0.3 if coded or cache_format else BOUNDS[dtype])
        ran += 1
        if ran == 2 or (target == "numpy" and variant.startswith("numba")):
            return
    if not ran:
        pytest.skip(reason)


@pytest.mark.parametrize(("op", "variant"), [*choices(gpu=False)])
def test_a_variant_gives_the_same(op, variant):
    check("numpy", op, variant)


@pytest.mark.parametrize(("op", "variant"), [*choices(gpu=True)])
def test_a_variant_gives_the_same_on_a_gpu(op, variant):
    check("cupy", op, variant)
