"""Every variant of every op, on every target it has here, against the float64 oracle."""

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

from sandbox.kernels import OPS, conformance, cuda
from sandbox.kernels.op import Tolerance, Variant


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


def just_wrong(got, want, tolerance):
    """Copies of `got`, as the oracle has it, in each one element a little too far from `want`."""
    for field in tolerance.fields:
        yield from just_wrong_field(got, want, field, tolerance)
    if tolerance.fields:
        return
    size = np.abs(want.astype(np.float64))
    size[~np.isfinite(size)] = -1
    exact = np.zeros(got.shape, bool)
    exact[..., tolerance.exact or slice(None if tolerance.ulps == 0 else 0)] = True
    for places, move in ((exact, to_the_next_number), (~exact, beyond_the_tolerance)):
        judged = np.where(places, size, -1)
        place = np.unravel_index(judged.argmax(), got.shape)
        if judged[place] >= 0:
            moved = got.copy()
            move(moved, want, tolerance, place)
            yield moved


def just_wrong_field(got, want, field, tolerance):
    """Codes may be one step away at most, numbers as far as those that are not packed."""
    part = (..., slice(field.offset, field.offset + field.nbytes))
    loose = field.name in tolerance.loose
    if field.dtype.itemsize > 1:
        each = Tolerance(tolerance.ulps * loose)
        parts = just_wrong(*(np.copy(rows[part]).view(field.dtype) for rows in (got, want)), each)
    else:
        codes = got[part].copy()
        codes.reshape(-1)[:1] ^= 2 if loose else 1
        parts = [codes]
    for moved in parts:
        if moved.size:
            rows = got.copy()
            rows[part] = moved.view(got.dtype)
            yield rows


def to_the_next_number(array, want, tolerance, place):
    conformance.bits_of(array)[place] ^= 1


def beyond_the_tolerance(array, want, tolerance, place):
    """Three times as far towards zero; by any distance where none is allowed."""
    want = want.astype(np.float64)
    squares = np.where(np.isfinite(want), want, 0) ** 2
    rms = np.sqrt(squares[place[:-1]].mean() if tolerance.by_row else squares.mean())
    allowed = tolerance.ulps * ml_dtypes.finfo(array.dtype).eps * (abs(want[place]) + rms)
    array[place] = want[place] - np.copysign(3 * allowed or 1, want[place])


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_an_element_just_too_far_is_wrong(op):
    """Whatever the op writes, in every dtype and format; as the oracle has it, it is right."""
    tried = set()
    for case in op.cases("conformance"):
        if case.size != "small":
            continue
        arguments = conformance.prepare(op, case, np)
        final = op.reference(**conformance.checked_arguments(op, arguments))
        for name in op.written(arguments):
            want, tolerance = final[name], op.tolerance(case)[name]
            got = want.astype(arguments[name].dtype)
            assert not conformance.distance(got, want, tolerance)[1]
            for wrong in just_wrong(got, want, tolerance) if got.size else ():
                error, message = conformance.distance(wrong, want, tolerance)
                assert message, (case.name, name)
                assert error > 1
                tried.add(name)
    assert tried == set(op.returns) | set(op.mutates)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_what_is_almost_right_is_wrong(op):
    """One element that is just too far, or one byte outside."""
    case = next(iter(op.cases("conformance")))
    reference = op.variants["reference"]

    def spoil(**arguments):
        want = op.reference(**arguments)
        reference.run(**arguments)
        name = next(name for name in op.written(arguments) if arguments[name].size)
        wrong = just_wrong(arguments[name], want[name], op.tolerance(case)[name])
        arguments[name][...] = next(wrong)

    spoiled = Variant(op, "spoiled", "numpy", spoil)
    assert conformance.run(op, spoiled, case, np).status == "WRONG"

    def scribble(**arguments):
        reference.run(**arguments)
        array = arguments[op.written(arguments)[0]]
        end = sum((n - 1) * s for n, s in zip(array.shape, array.strides)) + array.dtype.itemsize
        beyond = np.ndarray((1,), np.uint8, _memory(array), end)
        beyond[0] ^= 0xFF

    outcome = conformance.run(op, Variant(op, "scribbling", "numpy", scribble), case, np)
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
