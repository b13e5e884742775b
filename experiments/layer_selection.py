"""What a run of the layer does: the problems that options ask for, and each one's contenders."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from experiments import layer_problems
from experiments.layer_contenders import KINDS, LAYER, selected, variants_of
from experiments.layer_problems import Problem, Shape
from experiments.plan import BadOption, parse_dims, parse_dtype, parse_formats
from sandbox.kernels import OPS


@dataclass(frozen=True)
class LayerSelection:
    """The options of `layer` that decide what is run; None is the default of each."""

    gpu: bool
    dims: str = "deepseek_v3"
    dtype: str | None = None
    prefill: str | None = None
    decode: str | None = None
    formats: str | None = None
    contenders: str | None = None
    swaps: tuple[str, ...] = ()
    variant_files: tuple[Path, ...] = ()
    gate: bool = False
    max_autotune: bool = False
    tp_size: int = 1
    block_size: int | None = None
    workspace: int | None = None
    quick: bool = False
    seed: int = 0

    def command(self, problem: Problem, contender: str) -> str:
        """The command that makes one row again."""
        shape, given = problem.shape, variants_of(contender)
        words = ["python", "-m", "experiments", "layer", "--dims", self.dims]
        words += ["--prefill", shape.name.removeprefix("prefill_")] * (shape.phase == "prefill")
        words += ["--prefill", "none"] * (shape.phase != "prefill")
        words += ["--decode", shape.name.removeprefix("decode_")] * (shape.phase == "decode")
        words += ["--decode", "none"] * (shape.phase != "decode")
        words += ["--format", problem.cache_format, "--dtype", problem.dtype]
        words += ["--contenders", LAYER if given else contender]
        for op, variant in given.items():
            words += ["--swap", f"{op}={variant}"]
        for path in self.variant_files:
            words += ["--variant-file", str(path)]
        words += ["--gate"] * self.gate + ["--max-autotune"] * self.max_autotune
        words += ["--tp-size", str(self.tp_size)] * (self.tp_size > 1)
        words += ["--block-size", str(problem.block_size)]
        words += ["--workspace", str(problem.workspace_rows), "--seed", str(self.seed)]
        return shlex.join(words)


def plan_work(selection: LayerSelection) -> tuple[list[tuple[Problem, list[str]]], list[str]]:
    """Problems with the names of their contenders, and what is left out, in words.

    Raises:
        BadOption: an option has no meaning.
    """
    kinds, swaps = _kinds(selection), selection.swaps or layer_problems.SWAPS
    for swap in selection.swaps:
        _check_swap(swap)
    work, left_out = [], []
    for problem in _problems(selection):
        if reason := problem.format.refuses(problem.dims):
            text = f"{problem.cache_format} has no layout for {problem.dims_name}: {reason}"
            left_out += [text] * (text not in left_out)
            continue
        everywhere = bool(selection.swaps) or _takes_swaps(problem, selection.gpu)
        if names := selected(problem, kinds, swaps, everywhere):
            work.append((problem, names))
    run = {op for problem, _ in work for op in problem.ops()}
    for swap in selection.swaps:
        if work and swap.partition("=")[0] not in run:
            raise BadOption(f"--swap {swap!r}: these steps run {', '.join(sorted(run))} only")
    return work, left_out


def _takes_swaps(problem: Problem, gpu: bool) -> bool:
    return problem.plain and (not gpu or problem.shape.name in layer_problems.SWAPPED)


def _kinds(selection: LayerSelection) -> tuple[str, ...]:
    given = selection.contenders
    kinds = KINDS if given is None else tuple(part.strip() for part in given.split(","))
    for kind in kinds:
        if kind not in KINDS:
            raise BadOption(f"--contenders {kind!r}: expected {', '.join(KINDS)}")
    if selection.swaps:
        return (*kinds, "swaps")
    return tuple(kind for kind in kinds if given or kind != "swaps" or not selection.quick)


def _check_swap(swap: str) -> None:
    op, _, variant = swap.partition("=")
    if op not in OPS or not variant:
        raise BadOption(f"--swap {swap!r}: expected op=variant, with one of {', '.join(OPS)}")
    if variant not in OPS[op].variants:
        known = ", ".join(OPS[op].variants)
        raise BadOption(f"--swap {swap!r}: {op} has no such variant, only {known}")


def _problems(selection: LayerSelection) -> list[Problem]:
    gpu = selection.gpu
    name, dims = parse_dims(selection.dims)
    if selection.tp_size > 1:
        try:
            dims = dims.shard_heads(selection.tp_size)
        except ValueError as failure:
            raise BadOption(f"--tp-size {selection.tp_size}: {failure}") from failure
        name += f"_tp{selection.tp_size}"
    dtype = parse_dtype(selection.dtype or ("bfloat16" if gpu else "float32")).name
    common = {
        "dims": dims,
        "dims_name": name,
        "dtype": dtype,
        "gate": selection.gate,
        "block_size": selection.block_size or layer_problems.BLOCK_SIZES[gpu],
        "workspace_rows": selection.workspace or layer_problems.WORKSPACES[gpu],
        "seed": selection.seed,
    }
    if common["workspace_rows"] < common["block_size"]:
        raise BadOption(
            f"--workspace {common['workspace_rows']}: expected at least a block of "
            f"{common['block_size']} rows"
        )
    formats = _formats(selection, dtype)
    return [
        Problem(shape=shape, cache_format=fmt, **common)
        for shape in _shapes(selection)
        for fmt in formats
    ]


def _formats(selection: LayerSelection, dtype: str) -> tuple[str, ...]:
    if selection.formats is None:
        packed = "" if selection.quick else f",{layer_problems.PACKED_FORMATS}"
        return parse_formats(dtype + packed)
    found = parse_formats(selection.formats)
    plain = [name for name in found if not layer_problems.FORMATS[name].packed and name != dtype]
    if selection.formats.strip() == "all":
        return tuple(name for name in found if name not in plain)
    if plain:
        raise BadOption(f"--format {plain[0]}: numbers in the cache of a layer are its own {dtype}")
    return found


def _shapes(selection: LayerSelection) -> list[Shape]:
    quick, gpu = selection.quick, selection.gpu
    usual_prefills = layer_problems.QUICK_PREFILLS if quick else layer_problems.PREFILLS
    usual_decodes = layer_problems.QUICK_DECODES if quick else layer_problems.DECODES
    prefills = _read("--prefill", layer_problems.prefills, selection.prefill, usual_prefills[gpu])
    decodes = _read("--decode", layer_problems.decodes, selection.decode, usual_decodes[gpu])
    return prefills + decodes


def _read(
    option: str, read: Callable[[str], list[Shape]], given: str | None, usual: str
) -> list[Shape]:
    try:
        return read(usual if given is None else given)
    except ValueError as failure:
        raise BadOption(f"{option}: {failure}") from failure
