"""Who takes part: the layer, the layer with a variant swapped in, and references in torch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from experiments.layer_problems import Inputs, Problem
from sandbox import arrays
from sandbox.kernels import OPS, Unavailable
from sandbox.layers import MLALayer, MLAWeights, Workspace

LAYER, TORCH, HUGGINGFACE = "layer", "torch_compiled", "huggingface"
KINDS = (LAYER, "swaps", TORCH, HUGGINGFACE)


def swapped(op: str, variant: str) -> str:
    """The name of the layer with that variant of the op."""
    return f"{LAYER}[{op}={variant}]"


def variants_of(contender: str) -> dict[str, str]:
    """Ops and variants that a contender's name swaps in."""
    inside = contender.removeprefix(LAYER).strip("[]")
    if contender in (TORCH, HUGGINGFACE) or not inside:
        return {}
    op, _, variant = inside.partition("=")
    return {op: variant}


def target_of(contender: str, gpu: bool) -> str:
    """Where it runs: `gpu`, or for a layer on NumPy arrays the target of the variant swapped in."""
    if gpu:
        return "gpu"
    for op, variant in variants_of(contender).items():
        if variant in OPS[op].variants:
            return OPS[op].variants[variant].target(False)
    return "cpu"


class LayerContender:
    """`MLALayer` with its own choice of variants, but for those that are given."""

    writes_cache = True
    note = ""

    def __init__(
        self,
        inputs: Inputs,
        weights: MLAWeights,
        variants: Mapping[str, str],
        workspace: Workspace,
    ) -> None:
        problem = inputs.problem
        for op, variant in variants.items():
            known = OPS[op].variants[variant]
            if reason := known.unavailable(known.target(inputs.xp is not np)):
                raise Unavailable(reason)
        self._inputs, self._workspace = inputs, workspace
        self._by_torch = any(
            OPS[op].variants[name].kind == "torch" for op, name in variants.items()
        )
        self.layer = MLALayer(
            problem.dims,
            weights,
            cache_format=problem.cache_format,
            k_scale=inputs.k_scale,
            rope=inputs.rope,
            output_gate=problem.gate,
            variants=variants,
            workspace=workspace,
        )
        self._step = inputs.step()
        self.out = inputs.xp.empty_like(inputs.hidden)

    def queue(self) -> None:
        """Queue one step on the current stream."""
        inputs = self._inputs
        self.layer(inputs.hidden, None, inputs.cache, self._step, out=self.out)

    def capture(self, name: str, calls: Any, launches: int) -> Any:
        """A graph of the step; what torch's variants allocate in it stays its own."""
        from experiments import gpu_timing

        if not self._by_torch:
            return gpu_timing.captured(name, calls, launches)
        from experiments.torch_layer_reference import own_memory

        with own_memory() as pool:
            made = gpu_timing.captured(name, calls, launches)
        made.keeps = (made.keeps, pool)
        return made

    def memory(self) -> dict[str, int | None]:
        return {"workspace_bytes": self._workspace.nbytes, "peak_bytes": None}


class TorchContender:
    """A step in torch, over caches of its own that the contexts were restored to before."""

    writes_cache = False

    def __init__(
        self, inputs: Inputs, step: Callable[[], Any], describe: Callable[[], str]
    ) -> None:
        self._gpu, self._step, self._describe = inputs.xp is not np, step, describe
        self._result: Any = None

    @property
    def note(self) -> str:
        """What to know of it; complete once a step has run."""
        return self._describe()

    @property
    def out(self) -> Any:
        """What the last step, or the graph's last replay, left."""
        return arrays.adopt(self._result)

    def queue(self) -> None:
        if not self._gpu:
            self._result = self._step()
            return
        with arrays.torch_on_current_stream():
            self._result = self._step()

    def capture(self, name: str, calls: Any, launches: int) -> Any:
        """A graph in torch's own way; `launches` has to be 1."""
        from experiments import gpu_timing, torch_layer_reference

        replay, self._result = torch_layer_reference.captured(self._step)

        def enqueue() -> None:
            with arrays.torch_on_current_stream():
                replay()

        return gpu_timing.Contender(name, enqueue, launches, "graph", keeps=replay)

    def memory(self) -> dict[str, int | None]:
        if not self._gpu:
            return {"workspace_bytes": None, "peak_bytes": None}
        from experiments.torch_layer_reference import peak_bytes

        with arrays.torch_on_current_stream():
            return {"workspace_bytes": None, "peak_bytes": peak_bytes(self._step)}


def make(
    name: str, inputs: Inputs, weights: MLAWeights, workspace: Workspace, mode: str | None = None
) -> LayerContender | TorchContender:
    """A contender of the problem, by its name.

    Args:
        mode: of `torch.compile`.

    Raises:
        Unavailable: it cannot run here or on this problem, or it would take more memory than there
            is.
    """
    if name not in (TORCH, HUGGINGFACE):
        return LayerContender(inputs, weights, variants_of(name), workspace)
    problem, gpu = inputs.problem, inputs.xp is not np
    _require_torch(gpu)
    if name == TORCH:
        from experiments import torch_layer_reference as reference

        build = functools.partial(reference.torch_step, inputs, compiled=gpu, mode=mode)
    else:
        from experiments import torch_huggingface_layer as reference

        if reason := reference.unavailable(problem):
            raise Unavailable(reason)
        build = functools.partial(reference.huggingface_step, inputs)
    _require_memory(reference.estimated_bytes(problem), gpu)
    with arrays.torch_on_current_stream() if gpu else contextlib.nullcontext():
        return TorchContender(inputs, *build())


def _require_torch(gpu: bool) -> None:
    try:
        sees_gpu = arrays.torch_has_cuda()
    except ImportError as failure:
        raise Unavailable(f"torch does not import: {failure}") from failure
    if gpu and not sees_gpu:
        raise Unavailable("this torch is a CPU build or sees no GPU")


def _require_memory(needed: int, gpu: bool) -> None:
    if not gpu:
        return
    free = free_bytes()
    if needed > free:
        raise Unavailable(
            f"needs about {needed / 1e9:.1f} GB of GPU memory, {free / 1e9:.1f} GB are free"
        )


def free_bytes() -> int:
    """GPU memory that nobody uses: what allocators hold in vain is given back first."""
    cupy = arrays.import_cupy()
    cupy.get_default_memory_pool().free_all_blocks()
    try:
        from experiments.torch_layer_reference import empty_pools
    except ImportError:
        pass
    else:
        empty_pools()
    return cupy.cuda.runtime.memGetInfo()[0]


def selected(
    problem: Problem, kinds: tuple[str, ...], swaps: tuple[str, ...], everywhere: bool
) -> list[str]:
    """Names of a problem's contenders.

    The references run for the plain cache alone: the formats change nothing for them.

    Args:
        kinds: of `KINDS`.
        swaps: `op=variant`; those of ops that the step runs take part.
        everywhere: whether swaps run on this problem at all.
    """
    found = [LAYER] if LAYER in kinds else []
    if "swaps" in kinds and everywhere:
        pairs = [swap.split("=") for swap in swaps]
        found += [swapped(op, variant) for op, variant in pairs if op in problem.ops()]
    if problem.plain:
        found += [name for name in (TORCH, HUGGINGFACE) if name in kinds]
    return found
