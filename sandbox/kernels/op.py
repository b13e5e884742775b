"""What an op and a variant are: declare, register, choose, say why one cannot run here."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import pkgutil
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sandbox import arrays
from sandbox.cache_formats import FORMATS, Field
from sandbox.kernels import numba_target, require
from sandbox.kernels.case import Case
from sandbox.kernels.cuda import host_runner
from sandbox.kernels.cuda.device import device_info, no_device_reason

TARGETS_OF_KIND = {
    "cuda": ("gpu", "host"),
    "numba": ("gpu", "sim"),
    "torch": ("gpu", "cpu"),
    "numpy": ("gpu", "cpu"),
}


@dataclass(frozen=True)
class Output:
    """An array that an op writes: allocated when the caller passes None, else checked.

    One that the caller gives has a contiguous last axis, unless it may have `any_strides`. A matrix
    with a `column_multiple` is allocated column by column, each as long as a multiple of so many
    elements, whose rest nobody writes.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    any_strides: bool = False
    column_multiple: int = 0

    def allocate(self, empty: Callable[..., Any]) -> tuple[Any, ...]:
        """The output in each of the arrays over one memory that `empty(shape, dtype)` gives."""
        if not self.column_multiple:
            return empty(self.shape, self.dtype)
        rows, columns = self.shape
        padded = -(-rows // self.column_multiple) * self.column_multiple
        return tuple(array.T[:rows] for array in empty((columns, padded), self.dtype))


@dataclass(frozen=True)
class Cost:
    """What one call must move and compute, whatever the variant."""

    bytes_read: int
    bytes_written: int
    flops: int = 0

    @property
    def bytes(self) -> int:
        return self.bytes_read + self.bytes_written


@dataclass(frozen=True)
class Tolerance:
    """How far an output may be from the float64 oracle.

    An element may differ by `ulps * eps(dtype) * (|want| + rms(want))`; 0 means bit for bit.
    With `by_row` that is the rms of the last axis, row by row, for results that are sums of which
    each row has others. Columns of the last axis in `exact` must match bit for bit all the same.
    With `any_nan` a NaN may have other bits than the oracle's.

    The last axis of packed rows (`uint8`) is made of `fields`, each compared by itself: those named
    in `loose` may differ by `ulps` if they are floats of 16 or 32 bits, and by one code if they are
    codes; the others must match bit for bit, or as one NaN another.
    """

    ulps: float = 0.0
    exact: slice | None = None
    any_nan: bool = False
    by_row: bool = False
    fields: tuple[Field, ...] = ()
    loose: tuple[str, ...] = ()


class Unavailable(RuntimeError):
    """A variant cannot run here or on these arguments; the message says why."""


@dataclass(frozen=True, eq=False)
class Variant:
    """One implementation of an op.

    `run` takes the op's checked arguments by name, all on one device, and writes the outputs.
    `supports` may give a reason why it cannot take the arguments at hand, or None.
    """

    op: Op
    name: str
    kind: str
    run: Callable[..., None]
    min_cc: tuple[int, int] = (7, 5)
    dtypes: tuple[str, ...] | None = None
    supports: Callable[..., str | None] | None = None
    preference: int | Callable[..., int] = 0
    baseline: bool = False

    @property
    def idea(self) -> str:
        """The first line of the docstring: what this variant does that others do not."""
        return (inspect.getdoc(self.run) or "").partition("\n")[0]

    @property
    def targets(self) -> tuple[str, ...]:
        return TARGETS_OF_KIND[self.kind]

    def target(self, gpu: bool) -> str:
        return self.targets[0 if gpu else 1]

    @functools.cache  # noqa: B019 -- variants live as long as the process
    def unavailable(self, target: str) -> str | None:
        """Why this machine cannot run the variant on `target`, or None; found out once."""
        if target not in self.targets:
            return f"{self.kind} variants run on {' and '.join(self.targets)}"
        if target == "gpu":
            if reason := no_device_reason():
                return reason
            device = device_info()
            if self.kind == "cuda" and device.cc < self.min_cc:
                return f"needs compute capability {self.min_cc}, {device.name} has {device.cc}"
        if self.kind == "cuda" and target == "host":
            return host_runner.unavailable_reason()
        if self.kind == "numba":
            return numba_target.unavailable_reason(target)
        if self.kind == "torch":
            return _torch_missing(target)
        return None

    def preferred(self, arguments: Mapping[str, Any]) -> int:
        """How much `variant="auto"` wants it for these checked arguments."""
        return self.preference(**arguments) if callable(self.preference) else self.preference

    def refuses(self, arguments: Mapping[str, Any]) -> str | None:
        """Why the variant cannot take these checked arguments, or None."""
        if self.dtypes is not None:
            dtype = self.op.dtype_of(arguments)
            if dtype.name not in self.dtypes:
                return f"takes {', '.join(self.dtypes)}, not {dtype.name}"
        if self.supports is None:
            return None
        reason = self.supports(**arguments)
        if reason is not None and not (isinstance(reason, str) and reason):
            raise TypeError(
                f"{self.op.name} variant {self.name!r}: supports returned {reason!r}, expected a "
                "reason to refuse, or None"
            )
        return reason


def _library_stream(kind: str, array: Any) -> contextlib.AbstractContextManager[Any]:
    """Makes the current CuPy stream torch's too, for variants that call torch on a GPU."""
    if kind == "torch" and arrays.is_gpu(array):
        return arrays.torch_on_current_stream()
    return contextlib.nullcontext()


def _torch_missing(target: str) -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed: pip install mla-sandbox[torch]"
    if target == "gpu" and not arrays.torch_has_cuda():
        return "this torch is a CPU build or sees no GPU"
    return None


@dataclass(eq=False, repr=False)
class Op:
    """An op: its contract, its oracle, its cases, and the variants that implement it.

    Calling it checks the arguments by `contract`, allocates the outputs that the caller did not
    give, and runs one variant. Arrays may be NumPy, CuPy, torch, JAX or anything else that speaks
    DLPack; results are of the caller's kind.

    Attributes:
        contract: takes the adopted arguments by name, raises ValueError or TypeError on bad
            ones, and returns those to replace; an `Output` names an array to allocate or check.
        reference: the oracle. Same arguments; returns the final content of every array the op
            writes, by name, in float64 (or in the array's own dtype where the op only copies).
        make_inputs: `(case, xp) -> arguments` with hostile content, shared by tests and
            experiments; an output is among them where its place or layout is part of the problem.
        cases: `(purpose) -> cases`, purpose `"conformance"` or `"compare"`.
        workload_case: `(dims, dims_name, dtype, workload, size) -> case`, or None where the
            workload has no work.
        cost: `(case) -> Cost`.
        tolerance: `(case) -> {output: Tolerance}`.
        check_values: data-dependent checks (ids, slots, lengths); run for arrays in CPU memory,
            or when the call says `check_values=True` (which copies from the GPU and waits).
        mutates: arguments changed in place.
        returns: outputs that the call returns, in order.
        main_argument: the array whose dtype selects a specialisation.
    """

    name: str
    family: str
    contract: Callable[..., dict[str, Any]]
    reference: Callable[..., dict[str, Any]]
    make_inputs: Callable[[Case, Any], dict[str, Any]]
    cases: Callable[[str], Iterable[Case]]
    workload_case: Callable[..., Case | None]
    cost: Callable[[Case], Cost]
    tolerance: Callable[[Case], Mapping[str, Tolerance]]
    returns: tuple[str, ...]
    main_argument: str
    mutates: tuple[str, ...] = ()
    check_values: Callable[..., None] | None = None
    _variants: dict[str, Variant] = field(default_factory=dict)
    _discovered: bool = False

    def __post_init__(self) -> None:
        functools.update_wrapper(self, self.contract)
        self.signature = inspect.signature(self.contract)
        self._variants["reference"] = Variant(
            op=self, name="reference", kind="numpy", run=self._run_reference
        )

    def __repr__(self) -> str:
        return f"Op({self.name})"

    def __call__(
        self,
        *args: Any,
        variant: str | Variant = "auto",
        check_values: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.name}: {error}") from None
        bound.apply_defaults()
        with arrays.borrow(bound.arguments) as borrowed:
            prepared, results = self._prepare(borrowed, check_values)
            chosen = self.choose(variant, prepared)
            with _library_stream(chosen.kind, prepared[self.main_argument]):
                chosen.run(**prepared)
            returned = tuple(
                borrowed.returned(name, prepared[name], results[name])
                for name in self.returns
                if name in results
            )
        return returned[0] if len(returned) == 1 else returned or None

    def _prepare(
        self, borrowed: arrays.Borrowed, check_values: bool | None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        given = borrowed.arrays
        prepared = {**given, **self.contract(**given)}
        if fmt := FORMATS.get(prepared.get("cache_format")):
            for name in ("cache", "codes"):
                if name in given:
                    fmt.check_float8(borrowed.original(name), name)
        results: dict[str, Any] = {}
        outputs = {name: spec for name, spec in prepared.items() if isinstance(spec, Output)}
        for name, spec in outputs.items():
            if given[name] is not None:
                require.output(given[name], name, spec.shape, spec.dtype, spec.any_strides)
                borrowed.require_writeable(name)
                prepared[name] = given[name]
                results[name] = borrowed.original(name)
        borrowed.require_writeable(*self.mutates)
        on_cpu = borrowed.xp is np
        if self.check_values and (on_cpu if check_values is None else check_values):
            self.check_values(**prepared)
        for name, spec in outputs.items():
            if name not in results:
                prepared[name], results[name] = spec.allocate(borrowed.kind.empty)
        return prepared, results

    @property
    def variants(self) -> dict[str, Variant]:
        """All variants by name; the files of the op's folder are imported on first use."""
        with _DISCOVERY:  # another thread waits until all are there; a file that asks here does not
            if not self._discovered:
                self._discovered = True
                package = importlib.import_module(f"sandbox.kernels.{self.family}")
                for module in pkgutil.iter_modules(package.__path__):
                    if module.name.startswith(("raw_", "numba_", "torch_", "blas_")):
                        importlib.import_module(f"{package.__name__}.{module.name}")
        return self._variants

    def variant(
        self,
        name: str,
        *,
        kind: str,
        min_cc: tuple[int, int] = (7, 5),
        dtypes: tuple[str, ...] | None = None,
        supports: Callable[..., str | None] | None = None,
        preference: int | Callable[..., int] = 0,
        baseline: bool = False,
    ) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Register the decorated function as a variant; see `Variant` for the meaning.

        Args:
            name: unique in the op.
            kind: `"cuda"` (a `.cu` kernel: GPU or host runner), `"numba"` (GPU or simulator),
                `"torch"` or `"numpy"`.
            min_cc: least compute capability of the GPU.
            dtypes: names of the dtypes of the op's main array it takes; None is all.
            supports: takes the checked arguments by name; a reason to refuse them, or None.
            preference: `variant="auto"` takes the highest one that can run; a number, or a function
                of the checked arguments.
            baseline: what `compare` takes speed-ups over.

        Raises:
            ValueError: the kind is unknown or the name is taken.
        """
        if kind not in TARGETS_OF_KIND:
            raise ValueError(f"kind is {kind!r}, expected one of {', '.join(TARGETS_OF_KIND)}")
        if name in self._variants:
            raise ValueError(f"{self.name} already has a variant {name!r}")

        def register(run: Callable[..., None]) -> Callable[..., None]:
            self._variants[name] = Variant(
                self, name, kind, run, min_cc, dtypes, supports, preference, baseline
            )
            return run

        return register

    def choose(self, variant: str | Variant, arguments: Mapping[str, Any]) -> Variant:
        """The variant to run on checked arguments.

        `"auto"` is the reference on NumPy arrays, and on a GPU the runnable variant of highest
        preference.

        Raises:
            ValueError: no variant of that name.
            Unavailable: it cannot run here or on these arguments.
        """
        gpu = arrays.is_gpu(arguments[self.main_argument])
        if variant == "auto":
            return self._automatic(gpu, arguments)
        if isinstance(variant, str):
            if variant not in self.variants:
                known = ", ".join(self.variants)
                raise ValueError(f"{self.name} has no variant {variant!r}, only {known}")
            variant = self.variants[variant]
        reason = variant.unavailable(variant.target(gpu)) or variant.refuses(arguments)
        if reason:
            raise Unavailable(f"{self.name} variant {variant.name!r}: {reason}")
        return variant

    def _automatic(self, gpu: bool, arguments: Mapping[str, Any]) -> Variant:
        if gpu:
            for variant in sorted(self.variants.values(), key=lambda v: -v.preferred(arguments)):
                if not (variant.unavailable("gpu") or variant.refuses(arguments)):
                    return variant
        return self._variants["reference"]

    def dtype_of(self, arguments: Mapping[str, Any]) -> np.dtype:
        return arguments[self.main_argument].dtype

    def written(self, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the arrays that a call with these arguments writes."""
        return tuple(
            name for name in (*self.mutates, *self.returns) if arguments.get(name) is not None
        )

    def _run_reference(self, **arguments: Any) -> None:
        """The float64 oracle, rounded once into the outputs."""
        final = self.reference(**arguments)
        for name in self.written(arguments):
            arguments[name][...] = final[name].astype(arguments[name].dtype)


def operation(**declaration: Any) -> Callable[[Callable[..., dict[str, Any]]], Op]:
    """Turn a contract function into an `Op`; the keywords are the attributes of `Op`.

    The function's name is the op's, its signature and docstring are what callers see, and the
    folder it stands in is searched for variants.
    """

    def declare(contract: Callable[..., dict[str, Any]]) -> Op:
        family = contract.__module__.removeprefix("sandbox.kernels.").partition(".")[0]
        op = Op(name=contract.__name__, family=family, contract=contract, **declaration)
        OPS[op.name] = op
        return op

    return declare


OPS: dict[str, Op] = {}
_DISCOVERY = threading.RLock()
