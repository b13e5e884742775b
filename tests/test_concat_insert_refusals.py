"""Bad input to the inserts: an error that names the argument, and nothing written."""

import numpy as np
import pytest

from sandbox.dims import PRESETS
from sandbox.kernels import concat_insert, concat_insert_decode, concat_insert_prefill
from sandbox.kernels.case import Case, Workload
from sandbox.kernels.conformance import bits_of

OPS = (concat_insert, concat_insert_prefill, concat_insert_decode)


def problem(op):
    """Three tokens, three heads, P 24, R 8, L 40, V 16, float32, 5 blocks of 4."""
    workload = Workload("few", (7, 0), (2, 1))
    case = Case(PRESETS["tiny"], "tiny", np.dtype(np.float32), workload, {"block_size": 4})
    return op.make_inputs(case, np)


def slots(*values):
    return np.array(values, np.int64)


def _cast(name, dtype):
    return lambda a: {name: a[name].astype(dtype)}


def _cut(name, *index):
    return lambda a: {name: a[name][index]}


def _set(**values):
    return lambda a: values


INSERT_REFUSALS = {
    "kv_c missing": (_set(kv_c=None), TypeError, "kv_c"),
    "kv_c a list": (_set(kv_c=[[1.0]]), TypeError, "kv_c"),
    "kv_c float64": (_cast("kv_c", np.float64), TypeError, "kv_c"),
    "kv_c too short": (_cut("kv_c", slice(2)), ValueError, "kv_c"),
    "kv_c of rank 3": (_cut("kv_c", slice(None), None), ValueError, "kv_c"),
    "kv_c every other column": (_cut("kv_c", ..., slice(None, None, 2)), ValueError, "kv_c|cache"),
    "kv_c backwards": (_cut("kv_c", slice(None, None, -1)), ValueError, "kv_c"),
    "kv_c without columns": (_cut("kv_c", ..., slice(0)), ValueError, "kv_c"),
    "k_pe of another dtype": (_cast("k_pe", np.float16), TypeError, "k_pe"),
    "k_pe too short": (_cut("k_pe", slice(2)), ValueError, "k_pe"),
    "k_pe odd": (_cut("k_pe", ..., slice(7)), ValueError, "k_pe"),
    "k_pe missing": (_set(k_pe=None), ValueError, "cache|q_pe|q has"),
    "k_pe with heads": (lambda a: {"k_pe": np.stack([a["k_pe"]] * 2, 1)}, ValueError, "k_pe"),
    "cache of another dtype": (_cast("cache", np.float16), TypeError, "cache"),
    "cache of codes": (_set(cache=np.zeros((5, 4, 48), np.uint8)), TypeError, "cache"),
    "cache of other width": (_cut("cache", ..., slice(47)), ValueError, "cache.*48.*kv_c"),
    "cache of rank 2": (_cut("cache", 0), ValueError, "cache"),
    "cache of empty blocks": (_cut("cache", slice(None), slice(0)), ValueError, "cache"),
    "cache read only": (
        lambda a: {"cache": np.broadcast_to(a["cache"][:1], a["cache"].shape)},
        ValueError,
        "cache",
    ),
    "slots int32": (_cast("slot_mapping", np.int32), TypeError, "slot_mapping"),
    "slots uint64": (_cast("slot_mapping", np.uint64), TypeError, "slot_mapping"),
    "slots of rank 2": (_cut("slot_mapping", None), ValueError, "slot_mapping"),
    "slot beyond": (_set(slot_mapping=slots(0, 20, 1)), ValueError, "slot_mapping"),
}

ROPE_REFUSALS = {
    "no table": (_set(cos_sin=None), ValueError, "cos_sin is missing"),
    "no positions": (_set(positions=None), ValueError, "positions is missing"),
    "positions int32": (_cast("positions", np.int32), TypeError, "positions"),
    "positions too few": (_cut("positions", slice(2)), ValueError, "positions"),
    "position beyond": (_set(positions=slots(0, 1, 99)), ValueError, "positions"),
    "position negative": (_set(positions=slots(0, 1, -1)), ValueError, "positions"),
    "table float64": (_cast("cos_sin", np.float64), TypeError, "cos_sin"),
    "table too narrow": (_cut("cos_sin", ..., slice(4)), ValueError, "cos_sin"),
    "table empty": (_cut("cos_sin", slice(0)), ValueError, "cos_sin"),
}

HEAD_WIDTH = {concat_insert_prefill: 32, concat_insert_decode: 48}

OUTPUT_REFUSALS = {
    "q_out too short": (lambda w: np.zeros((2, 3, w), np.float32), ValueError),
    "q_out of other width": (lambda w: np.zeros((3, 3, w - 1), np.float32), ValueError),
    "q_out of other heads": (lambda w: np.zeros((3, 2, w), np.float32), ValueError),
    "q_out of another dtype": (lambda w: np.zeros((3, 3, w), np.float16), TypeError),
    "q_out every other column": (
        lambda w: np.zeros((3, 3, 2 * w), np.float32)[..., ::2],
        ValueError,
    ),
    "q_out read only": (lambda w: np.broadcast_to(np.float32(0), (3, 3, w)), ValueError),
}

PREFILL_REFUSALS = {
    "q too narrow": (_cut("q", ..., slice(31)), ValueError, "q has"),
    "q too short": (_cut("q", slice(2)), ValueError, "q has"),
    "q of other heads": (_cut("q", slice(None), slice(2)), ValueError, "q has"),
    "q of another dtype": (_cast("q", np.float16), TypeError, "q is"),
    "no heads": (
        lambda a: {"q": a["q"][:, :0], "k_nope": a["k_nope"][:, :0]},
        ValueError,
        "k_nope",
    ),
    "k_nope of rank 2": (_cut("k_nope", slice(None), 0), ValueError, "k_nope"),
    "k_nope too short": (_cut("k_nope", slice(2)), ValueError, "k_nope"),
    "k_nope without columns": (_cut("k_nope", ..., slice(0)), ValueError, "k_nope"),
    "q_out overlaps q": (lambda a: {"q_out": a["q"][1:]}, ValueError, "q_out.*q"),
    "k_out is q": (lambda a: {"k_out": a["q"]}, ValueError, "k_out.*q"),
}

DECODE_REFUSALS = {
    "ql_nope of other width": (_cut("ql_nope", ..., slice(39)), ValueError, "ql_nope"),
    "ql_nope not transposed": (lambda a: {"ql_nope": a["ql_nope"].swapaxes(0, 1)}, ValueError, "."),
    "q_pe of other heads": (_cut("q_pe", slice(None), slice(2)), ValueError, "q_pe"),
    "q_pe of other width": (_cut("q_pe", ..., slice(6)), ValueError, "q_pe"),
    "q_pe missing": (_set(q_pe=None), ValueError, "q_pe"),
    "q_pe of another dtype": (_cast("q_pe", np.float16), TypeError, "q_pe"),
}


def refusals():
    for op in OPS:
        listed = dict(INSERT_REFUSALS)
        if op is not concat_insert:
            listed |= ROPE_REFUSALS
            for name, (make, error) in OUTPUT_REFUSALS.items():
                listed[name] = (_set(q_out=make(HEAD_WIDTH[op])), error, "q_out")
        extra = {concat_insert_prefill: PREFILL_REFUSALS, concat_insert_decode: DECODE_REFUSALS}
        for name, (change, error, match) in {**listed, **extra.get(op, {})}.items():
            yield pytest.param(op, change, error, match, id=f"{op.name}-{name}".replace(" ", "_"))


@pytest.mark.parametrize(("op", "change", "error", "match"), list(refusals()))
def test_bad_input_is_refused_and_nothing_written(op, change, error, match):
    arguments = problem(op)
    given = {name: array for name, array in arguments.items() if array is not None}
    changed = {**arguments, **change(arguments)}
    before = {name: array.copy() for name, array in given.items()}
    with pytest.raises(error, match=match):
        op(**changed, variant="reference")
    for name, array in given.items():
        assert (bits_of(array) == bits_of(before[name])).all(), name


def test_a_cache_whose_rows_overlap_is_refused():
    cache = np.lib.stride_tricks.as_strided(np.zeros(4000, np.uint8), (2, 4, 48), (96, 24, 1))
    rows = np.ones((8, 40), np.float32), np.ones((8, 8), np.float32)
    with pytest.raises(ValueError, match="cache has strides"):
        concat_insert(*rows, cache, np.arange(8), cache_format="fp8_e4m3", k_scale=1.0)
