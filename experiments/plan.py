"""What a comparison runs: ops, variants, targets, and the cases of each."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from experiments import workloads
from experiments.session import CPU_TARGETS, Problem
from experiments.worker import import_variant_file
from experiments.workloads import Limits
from sandbox import arrays
from sandbox.cache_formats import FORMATS
from sandbox.dims import PRESETS, MLADims
from sandbox.kernels import OPS, require
from sandbox.kernels.case import Case, Workload
from sandbox.kernels.cuda import no_device_reason
from sandbox.kernels.failures import described
from sandbox.kernels.op import Op

TARGETS = ("gpu", *CPU_TARGETS)
MEDIUM = Limits(requests=12, context_tokens=2048, query_tokens=48)
SMALL = Limits(requests=3, context_tokens=24, query_tokens=6)
LETTERS = {
    "N": "num_heads",
    "H": "hidden_size",
    "Lq": "q_lora_rank",
    "L": "kv_lora_rank",
    "P": "qk_nope_head_dim",
    "R": "qk_rope_head_dim",
    "V": "v_head_dim",
}
KEPT_OPTIONS = ("trace", "batches", "scale", "dims", "dtype", "format", "seed")
"""Options that a reproduced row needs as they were."""
FLAGS = ("quick", "checked")
DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


class BadOption(ValueError):
    """An option has no meaning; the message names it and what it may be."""


@dataclass(frozen=True)
class Selection:
    """The options of `compare` that decide what is run; None is the default of each.

    `scale` divides a trace's lengths on any machine; None scales down only what a CPU could not
    take in time.
    """

    ops: tuple[str, ...] = ()
    variants: str | None = None
    variant_files: tuple[Path, ...] = ()
    case: str | None = None
    trace: Path | None = None
    batches: int | None = None
    scale: int | None = None
    dims: str | None = None
    dtype: str | None = None
    format: str | None = None
    target: str | None = None
    quick: bool = False
    checked: bool = False
    seed: int = 0

    def command(self, op: str, case: str, variant: str, target: str) -> str:
        """The command that makes one row again."""
        words = ["python", "-m", "experiments", "compare", op, "--case", case]
        words += ["--variants", variant, "--target", target]
        for each in fields(self):
            value = getattr(self, each.name)
            option = "--" + each.name.replace("_", "-").removesuffix("s")
            if each.name == "variant_files":
                for path in value:
                    words += [option, str(path)]
            elif each.name in FLAGS:
                words += [option] * value
            elif each.name in KEPT_OPTIONS and value != each.default:
                words += ["--" + each.name, str(value)]
        return shlex.join(words)


def import_variant_files(paths: Iterable[Path]) -> None:
    """Registers the variants of the user's files. Raises BadOption, which names the file."""
    for path in paths:
        try:
            import_variant_file(path)
        except Exception as failure:
            raise BadOption(f"--variant-file {path}: {described(failure)}") from failure


def chosen_ops(names: Sequence[str]) -> list[Op]:
    for name in names:
        if name not in OPS:
            raise BadOption(f"no op {name!r}; there are {', '.join(OPS)}")
    return [OPS[name] for name in dict.fromkeys(names)] if names else list(OPS.values())


def chosen_targets(option: str | None) -> tuple[str, ...]:
    """The targets of a comma-separated list; by default the GPU, or all others without one."""
    if option is None:
        return CPU_TARGETS if no_device_reason() else ("gpu",)
    wanted = tuple(part.strip() for part in option.split(","))
    for target in wanted:
        if target not in TARGETS:
            raise BadOption(f"--target {target!r}: expected {', '.join(TARGETS)}")
    return wanted


def chosen_variants(ops: Sequence[Op], option: str | None) -> dict[str, list[str]]:
    """Variant names of each op that match a comma-separated list of names or patterns.

    By default all but the reference, which is what the others are compared with.
    """
    if option is None:
        return {op.name: [name for name in op.variants if name != "reference"] for op in ops}
    patterns = [part.strip() for part in option.split(",")]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for op in ops for name in op.variants):
            known = "; ".join(f"{op.name}: {', '.join(op.variants)}" for op in ops)
            raise BadOption(f"--variants: no variant matches {pattern!r}. {known}")
    return {
        op.name: [name for name in op.variants if any(fnmatchcase(name, p) for p in patterns)]
        for op in ops
    }


def parse_dims(text: str) -> tuple[str, MLADims]:
    """A name and dims from a preset's name, or letters such as `N=16,L=256` or both.

    Letters that are not given are those of the preset, by default deepseek_v3.
    """
    parts = [part.strip() for part in text.split(",")]
    preset = "deepseek_v3"
    if "=" not in parts[0]:
        preset = parts.pop(0)
        if preset not in PRESETS:
            raise BadOption(f"--dims {preset!r}: no such preset; there are {', '.join(PRESETS)}")
    changes: dict[str, int] = {}
    for part in parts:
        letter, _, number = part.partition("=")
        if letter not in LETTERS or not number.isdigit():
            raise BadOption(f"--dims {part!r}: expected letters of {', '.join(LETTERS)}, as N=16")
        changes[LETTERS[letter]] = int(number)
    name = "_".join([preset, *(part.replace("=", "") for part in parts)])
    try:
        return name, replace(PRESETS[preset], **changes)
    except ValueError as failure:
        raise BadOption(f"--dims {text!r}: {failure}") from failure


def parse_dtype(text: str) -> np.dtype:
    name = DTYPE_NAMES.get(text, text)
    known = [dtype.name for dtype in require.FLOATS]
    if name not in known:
        raise BadOption(f"--dtype {text!r}: expected {', '.join(known)}")
    return arrays.DTYPES[name]


def parse_formats(text: str) -> tuple[str, ...]:
    """Names of cache formats from a comma-separated list; `all` is every one."""
    names = tuple(part.strip() for part in text.split(","))
    if names == ("all",):
        return tuple(FORMATS)
    for name in names:
        if name not in FORMATS:
            raise BadOption(f"--format {name!r}: expected {', '.join(FORMATS)}, or all")
    return names


def formats_of(op: Op) -> tuple[str, ...]:
    """Names of the cache formats of an op's cases; none for an op that knows no format."""
    cases = [*op.cases("conformance"), *op.cases("compare")]
    if not any("format" in case.options for case in cases):
        return ()
    return tuple(dict.fromkeys(case.format.name for case in cases))


def trace_batches(selection: Selection, gpu: bool) -> list[Workload]:
    """The batches of the trace, or, without one, of the generator."""
    count = selection.batches or (4 if gpu or selection.trace else 2)
    if selection.trace is not None:
        return workloads.batches(workloads.read_trace(selection.trace), count, "trace")
    return workloads.batches(workloads.Generator()(selection.seed), count, "generated")


class Planner:
    """The cases of each op for one selection and its targets.

    They are the op's own compare cases and batches of generated requests, or with a trace the
    trace's batches alone. Without a GPU the batches are scaled down to what NumPy and the host
    runner can take, and the first one further, with tiny dims, to what the simulator can.

    Attributes:
        left_out: what was asked for and cannot be, in words.
    """

    def __init__(self, selection: Selection, targets: Sequence[str]) -> None:
        self._selection = selection
        self._gpu = "gpu" in targets
        self._dims = parse_dims(selection.dims) if selection.dims else None
        self._dtype = parse_dtype(selection.dtype) if selection.dtype else None
        self._formats = parse_formats(selection.format) if selection.format else None
        generated = selection.trace is None and selection.quick
        self._batches = [] if generated else trace_batches(selection, self._gpu)
        self.left_out: list[str] = []

    def problems(self, op: Op) -> list[Problem]:
        formats = self._formats_of(op)
        own = [] if self._selection.trace else self._own_cases(op, formats)
        found = [*own, *self._workload_cases(op, formats)]
        found = [
            replace(problem, case=replace(problem.case, seed=self._selection.seed))
            for problem in found
        ]
        unique = list({problem.case.name: problem for problem in found}.values())
        return [problem for problem in self._matching(unique) if self._has_layout(problem.case)]

    def _formats_of(self, op: Op) -> Sequence[str] | None:
        """The formats that were asked for and that the op has; None leaves its cases theirs."""
        known = formats_of(op)
        if self._formats is None or not known:
            return None
        if self._selection.format != "all":
            for name in self._formats:
                if name not in known:
                    self._leave_out(f"{op.name} has no {name} cases")
        return [name for name in self._formats if name in known]

    def _own_cases(self, op: Op, formats: Sequence[str] | None) -> Iterator[Problem]:
        for case in op.cases("compare"):
            if self._selection.quick and not self._gpu and case.size != "small":
                continue
            altered = case
            if self._dims:
                altered = replace(altered, dims=self._dims[1], dims_name=self._dims[0])
            if self._dtype is not None:
                altered = replace(altered, dtype=self._dtype)
            if formats is None or altered.format.name in formats:
                yield Problem(altered, altered=altered != case)

    def _workload_cases(self, op: Op, formats: Sequence[str] | None) -> Iterator[Problem]:
        name, dims = self._dims or ("deepseek_v3", PRESETS["deepseek_v3"])
        dtype = self._dtype if self._dtype is not None else arrays.bfloat16
        altered = self._dims is not None or self._dtype is not None
        for index, batch in enumerate(self._batches):
            for size, scaled in self._sizes(batch, index):
                tiny = size == "small" and self._dims is None
                shape = ("tiny", PRESETS["tiny"]) if tiny else (name, dims)
                case = op.workload_case(shape[1], shape[0], dtype, scaled.workload, size)
                if case is None:
                    continue
                made = [case] if formats is None else [case.in_format(name) for name in formats]
                for each in made:
                    if self._dtype is None or each.dtype == self._dtype:
                        yield Problem(each, scaled.description, altered)

    def _has_layout(self, case: Case) -> bool:
        reason = case.format.refuses(case.dims)
        if reason:
            self._leave_out(f"{case.format.name} has no layout for {case.dims_name}: {reason}")
        return not reason

    def _leave_out(self, what: str) -> None:
        if what not in self.left_out:
            self.left_out.append(what)

    def _sizes(self, batch: Workload, index: int) -> Iterator[tuple[str, workloads.Scaled]]:
        if self._selection.scale is not None:
            scaled = workloads.divide(batch, self._selection.scale)
            yield "large" if self._gpu else "medium", scaled
        elif self._gpu:
            yield "large", workloads.Scaled(batch)
        else:
            if index == 0:
                yield "small", workloads.scale_down(batch, SMALL)
            yield "medium", workloads.scale_down(batch, MEDIUM)

    def _matching(self, problems: list[Problem]) -> list[Problem]:
        wanted = self._selection.case
        if wanted is None:
            return problems
        exact = [problem for problem in problems if problem.case.name == wanted]
        return exact or [problem for problem in problems if wanted in problem.case.name]
