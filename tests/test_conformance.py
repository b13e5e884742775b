"""Every variant of every op, on every target it has here, against the float64 oracle."""

from collections.abc import Iterator

import numpy as np
import pytest

from sandbox.kernels import OPS, conformance, cuda


def problems() -> Iterator[object]:
    for op in OPS.values():
        for variant in op.variants.values():
            for target in variant.targets:
                marks = [pytest.mark.gpu] if target == "gpu" else []
                for case in op.cases("conformance"):
                    if case.affordable(target):
                        name = f"{op.name}-{variant.name}-{target}-{case.name}"
                        yield pytest.param(op, variant, target, case, id=name, marks=marks)


@pytest.mark.parametrize(("op", "variant", "target", "case"), list(problems()))
def test_matches_the_oracle(op, variant, target, case):
    if reason := variant.unavailable(target):
        pytest.skip(reason)
    if target == "gpu":
        import cupy as xp
    else:
        xp = np
    checked = target == "host" and case.size == "small"
    seed = case.seed + 1 if checked else None
    with cuda.host_options(checked=checked, seed=seed, global_races=checked):
        outcome = conformance.run(op, variant, case, xp)
    if outcome.status == "UNAVAILABLE":
        pytest.skip(outcome.message)
    assert outcome.passed, outcome.message


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_oracle_rejects_what_is_almost_right(op):
    """The harness has teeth: one element one step off, or one byte outside, is WRONG."""
    case = next(iter(op.cases("conformance")))

    def spoil(**arguments):
        op.variants["reference"].run(**arguments)
        for name in op.written(arguments):
            flat = arguments[name]
            if flat.size:
                bits = conformance.bits_of(flat)
                where = tuple(0 for _ in flat.shape)
                bits[where] ^= bits.dtype.type(1 << (8 * flat.dtype.itemsize - 2))
                break

    spoiled = type(op.variants["reference"])(op, "spoiled", "numpy", spoil)
    assert conformance.run(op, spoiled, case, np).status == "WRONG"

    def scribble(**arguments):
        op.variants["reference"].run(**arguments)
        name = op.written(arguments)[0]
        array = arguments[name]
        end = sum((n - 1) * s for n, s in zip(array.shape, array.strides)) + array.dtype.itemsize
        beyond = np.ndarray((1,), np.uint8, _memory(array), end)
        beyond[0] ^= 0xFF

    scribbling = type(spoiled)(op, "scribbling", "numpy", scribble)
    outcome = conformance.run(op, scribbling, case, np)
    assert outcome.status == "WRONG"
    assert "guard byte" in outcome.message


def _memory(array):
    import ctypes

    span = (ctypes.c_uint8 * (1 << 30)).from_address(array.ctypes.data)
    return memoryview(span)


def test_halves_of_one_array_stay_side_by_side_and_holes_are_guarded():
    whole = np.arange(24, dtype=np.float32).reshape(3, 8)
    arguments = {"left": whole[:, :3], "right": whole[:, 4:7], "other": np.ones(2), "none": None}
    guarded = conformance.guard({**arguments, "again": arguments["left"]})
    left, right = guarded["left"], guarded["right"]
    assert guarded["again"] is left
    assert left.buffer is right.buffer
    assert guarded["other"].buffer is not left.buffer
    assert right.array.ctypes.data - left.array.ctypes.data == 16
    np.testing.assert_array_equal(right.array, arguments["right"])
    left.array[...] = right.array[...] = 5
    assert left.damaged() is right.damaged() is None
    left.buffer[left.offset + 12] ^= 1
    assert left.damaged() == 12
    assert right.damaged() == -4
