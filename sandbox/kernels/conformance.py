"""Run one variant on one case between guard bytes, and compare it with the float64 oracle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sandbox import arrays
from sandbox.cache_formats import Field
from sandbox.kernels.case import Case
from sandbox.kernels.failures import described
from sandbox.kernels.op import Op, Output, Tolerance, Variant

GUARD_BYTES = 512
GUARD_PATTERN = 0xA5
SLACK = 256
"""Addresses of guarded copies are those of the originals modulo this."""
POISON = 0xFF
"""Every byte of an output before a run: NaN in each float type, and no count or code we use."""


@dataclass(frozen=True)
class Outcome:
    """What became of one variant on one case.

    `error` is the largest distance to the oracle over the distance allowed (1 is the limit), or
    None where nothing was compared; an output that must match bit for bit has error 0.
    """

    status: str
    message: str = ""
    error: float | None = None

    @property
    def passed(self) -> bool:
        return self.status == "PASSED"


class Guarded:
    """A copy of an array, with its strides, between guard bytes; holes of a view are guarded.

    Arrays that lie in each other's holes, such as two halves of one projection, share a buffer.
    """

    def __init__(self, buffer: Any, offset: int, source: Any) -> None:
        self.buffer, self.offset = buffer, offset
        self.array = _view(buffer, offset, source)
        self.array[...] = source
        self.beside: list[Guarded] = [self]

    def damaged(self) -> int | None:
        """Byte offset, from the array's start, of the first guard byte that changed, or None."""
        xp = arrays.namespace(self.buffer)
        intact = xp.full_like(self.buffer, GUARD_PATTERN)
        for each in self.beside:
            _view(intact, each.offset, each.array)[...] = each.array
        changed = xp.flatnonzero(intact != self.buffer)
        return int(changed[0]) - self.offset if changed.size else None


def _view(buffer: Any, offset: int, like: Any) -> Any:
    if isinstance(buffer, np.ndarray):
        return np.ndarray(like.shape, like.dtype, buffer, offset, like.strides)
    return type(buffer)(like.shape, like.dtype, buffer.data + offset, like.strides)


def _address(array: Any) -> int:
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


def fill_poison(array: Any) -> None:
    """Set every byte of the array's elements to `POISON`."""
    bits_of(array)[...] = bits_of(array).dtype.type(-1 % (1 << 8 * array.dtype.itemsize))


def bits_of(array: Any) -> Any:
    """The elements as unsigned integers, sharing memory."""
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


def prepare(op: Op, case: Case, xp: Any) -> dict[str, Any]:
    """Arguments of a call on `case`, every written array poisoned (outputs) or as it was."""
    arguments = _bind(op, op.make_inputs(case, xp))
    for name, spec in op.contract(**arguments).items():
        if isinstance(spec, Output) and arguments[name] is None:
            (arguments[name],) = spec.allocate(lambda *each: (xp.empty(*each),))
            fill_poison(arguments[name])
    return arguments


def _bind(op: Op, inputs: dict[str, Any]) -> dict[str, Any]:
    bound = op.signature.bind(**inputs)
    bound.apply_defaults()
    return dict(bound.arguments)


def run(op: Op, variant: Variant, case: Case, xp: Any) -> Outcome:
    """Run `variant` on `case` with arrays of `xp` and judge everything that it did.

    PASSED: every element of every written array is within tolerance, nothing else changed.
    WRONG: an output, a guard byte, or an input differs. ERROR: it raised. UNAVAILABLE: it cannot
    run here or on these arguments, and says why.
    """
    target = variant.target(xp is not np)
    reason = variant.unavailable(target)
    if reason is None and not case.affordable(target):
        reason = f"{case.size} cases are not run on {target}"
    if reason:
        return Outcome("UNAVAILABLE", reason)
    arguments = prepare(op, case, xp)
    prepared = checked_arguments(op, arguments)
    try:
        if reason := variant.refuses(prepared):
            return Outcome("UNAVAILABLE", reason)
    except Exception as failure:
        return Outcome("ERROR", described(failure))
    expected = op.reference(**prepared)
    guarded = guard(arguments)
    call = {name: guarded[name].array if name in guarded else arguments[name] for name in arguments}
    try:
        op(**call, variant=variant, check_values=False)
        if xp is not np:
            xp.cuda.get_current_stream().synchronize()
    except Exception as failure:
        return Outcome("ERROR", described(failure))
    return judge(op, case, arguments, guarded, expected)


def guard(arguments: dict[str, Any]) -> dict[str, Guarded]:
    """A guarded copy of every array; the same array passed under two names stays one."""
    found = {id(value): value for value in arguments.values() if arrays.is_array(value)}
    copies: dict[int, Guarded] = {}
    for group in _interleaved(list(found.values())):
        start, end = _address(group[0]), max(_end(array) for array in group)
        xp = arrays.namespace(group[0])
        buffer = xp.full(end - start + 2 * GUARD_BYTES + SLACK, GUARD_PATTERN, dtype=np.uint8)
        first = GUARD_BYTES + (start - _address(buffer) - GUARD_BYTES) % SLACK
        beside = [Guarded(buffer, first + _address(array) - start, array) for array in group]
        for array, guarded in zip(group, beside):
            guarded.beside = beside
            copies[id(array)] = guarded
    return {name: copies[id(value)] for name, value in arguments.items() if id(value) in copies}


def _interleaved(found: list[Any]) -> list[list[Any]]:
    """The arrays by the start of their memory, together where one begins inside another."""
    groups: list[list[Any]] = []
    reach = 0
    for array in sorted(found, key=_address):
        if groups and array.size and _address(array) < reach:
            groups[-1].append(array)
        else:
            groups.append([array])
        reach = max(reach, _end(array))
    return groups


def _end(array: Any) -> int:
    """Address after the last element."""
    if not array.size:
        return _address(array)
    span = sum((n - 1) * s for n, s in zip(array.shape, array.strides))
    return _address(array) + span + array.dtype.itemsize


def checked_arguments(op: Op, arguments: dict[str, Any]) -> dict[str, Any]:
    """What a variant's function gets for these arguments: the contract's replacements included."""
    replaced = op.contract(**arguments)
    kept = {name: value for name, value in replaced.items() if not isinstance(value, Output)}
    return {**arguments, **kept}


def judge(
    op: Op,
    case: Case,
    before: dict[str, Any],
    after: dict[str, Guarded],
    expected: dict[str, Any],
) -> Outcome:
    """Compare what a call left behind with the oracle's word and with what was there before."""
    tolerances = op.tolerance(case)
    worst = 0.0
    written = {id(after[name]): name for name in op.written(before)}
    for name, guarded in after.items():
        place = guarded.damaged()
        if place is not None:
            return Outcome("WRONG", f"{name}: guard byte at offset {place} was overwritten")
        if id(guarded) not in written and not _same_bits(guarded.array, before[name]):
            return Outcome("WRONG", f"{name} is an input and was changed")
    for name in written.values():
        error, message = distance(after[name].array, expected[name], tolerances[name])
        worst = max(worst, error)
        if message:
            return Outcome("WRONG", f"{name}: {message}", error)
    return Outcome("PASSED", error=worst)


def _same_bits(left: Any, right: Any) -> bool:
    return bool((bits_of(left) == bits_of(right)).all())


@np.errstate(invalid="ignore")
def distance(got: Any, want: Any, tolerance: Tolerance) -> tuple[float, str]:
    """Largest error over what is allowed, and a message when that is too far (else empty)."""
    if not got.size:
        return 0.0, ""
    if tolerance.fields:
        return _packed_distance(got, want, tolerance)
    xp = arrays.namespace(got)
    exact = xp.zeros(got.shape[-1:], dtype=bool) if got.ndim else xp.zeros((), dtype=bool)
    if tolerance.ulps == 0:
        exact[...] = True
    elif tolerance.exact is not None:
        exact[tolerance.exact] = True
    with np.errstate(over="ignore"):
        rounded = want.astype(got.dtype)
    both_nan = xp.isnan(got.astype(np.float32)) & xp.isnan(rounded.astype(np.float32))
    same = bits_of(got) == bits_of(rounded)
    differs = ~(same | both_nan if tolerance.any_nan else same) & exact
    if bool(differs.any()):
        return np.inf, _describe(xp, differs, got, rounded, "must match bit for bit")
    if tolerance.ulps == 0:
        return 0.0, ""
    got64, want64 = got.astype(np.float64), want.astype(np.float64)
    finite = xp.isfinite(want64)
    squares = xp.where(finite, want64, 0.0) ** 2
    rms = xp.sqrt(squares.mean(axis=-1, keepdims=True) if tolerance.by_row else squares.mean())
    allowed = tolerance.ulps * _eps(got.dtype) * (xp.abs(want64) + rms)
    agree = (got64 == want64) | both_nan | exact | same
    gap = xp.where(agree, 0.0, xp.abs(got64 - want64))
    ratio = xp.where(agree, 0.0, gap / xp.where(allowed > 0, allowed, 1e-300))
    ratio = xp.where(xp.isnan(ratio), np.inf, ratio)
    worst = float(ratio.max())
    if worst > 1.0:
        return worst, _describe(xp, ratio > 1.0, got, want64, f"{worst:.3g} x the allowed error")
    return worst, ""


def _packed_distance(got: Any, want: Any, tolerance: Tolerance) -> tuple[float, str]:
    """The largest distance of any field of packed rows, and a message that names the field."""
    xp = arrays.namespace(got)
    worst = 0.0
    for field in tolerance.fields:
        part = slice(field.offset, field.offset + field.nbytes)
        left, right = (xp.ascontiguousarray(rows[..., part]) for rows in (got, want))
        loose = field.name in tolerance.loose
        if field.dtype.itemsize > 1:
            pair = (rows.view(field.dtype) for rows in (left, right))
            error, message = distance(*pair, Tolerance(tolerance.ulps * loose, any_nan=True))
        elif not loose:
            error, message = distance(left, right, Tolerance())
        else:
            error, message = _code_distance(left, right, field)
        worst = max(worst, error)
        if message:
            return worst, f"{field.name}: {message}"
    return worst, ""


def _code_distance(got: Any, want: Any, field: Field) -> tuple[float, str]:
    """Codes may be one step from each other; what is no number must be the same code."""
    xp = arrays.namespace(got)
    if field.dtype == np.uint8:
        got, want = (xp.stack([x & 0xF, x >> 4], axis=-1) for x in (got, want))
        left, right = (((x.astype(np.int32) + 8) & 0xF) for x in (got, want))
        odd = xp.zeros(got.shape, bool)
    elif field.dtype == np.int8:
        left, right = (x.view(np.int8).astype(np.int32) for x in (got, want))
        odd = xp.zeros(got.shape, bool)
    else:
        left, right = (_ordinal(xp, x) for x in (got, want))
        table = xp.asarray(~np.isfinite(np.arange(256, dtype=np.uint8).view(field.dtype)))
        odd = table[got] | table[want]
    steps = xp.abs(left - right)
    wrong = (steps > 1) | (odd & (got != want))
    if bool(wrong.any()):
        return np.inf, _describe(xp, wrong, got, want, "may differ by one code")
    return float(steps.max()), ""


def _ordinal(xp: Any, codes: Any) -> Any:
    """Place of each 8-bit float's code on the number line."""
    magnitude = (codes & 0x7F).astype(np.int32)
    return xp.where(codes > 0x7F, -magnitude, magnitude)


def _eps(dtype: np.dtype) -> float:
    return {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}[
        dtype.name
    ]


def _describe(xp: Any, wrong: Any, got: Any, want: Any, what: str) -> str:
    first = tuple(int(axis[0]) for axis in xp.nonzero(wrong))
    count = int(wrong.sum())
    return (
        f"{count} of {wrong.size} elements wrong ({what}), first at {first}: "
        f"got {_shown(got, first)}, expected {_shown(want, first)}"
    )


def _shown(array: Any, place: tuple[int, ...]) -> str:
    """The element, and whether it has the bytes of what nothing has written."""
    number = repr(float(array[place]))
    if int(bits_of(array)[place]) != (1 << 8 * array.dtype.itemsize) - 1:
        return number
    return f"{number} ({'never written' if array.dtype.itemsize > 1 else 'or never written'})"
