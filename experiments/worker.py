"""A process that runs variants, so that one that crashes takes nothing else with it.

It reads pickled tasks from standard input and answers each with JSON lines on standard output:
any number of `{"stage": ...}`, then `{"done": ..., "poisoned": ...}` or `{"failed": ..., "variant":
..., "poisoned": ...}`. Poisoned means that its CUDA context is lost and that it ends. What kernels
print goes to standard error.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from experiments.measure import VariantFailed
from experiments.results import jsonable
from experiments.vector_checks import check_variant
from sandbox.kernels import OPS, conformance
from sandbox.kernels.case import Case
from sandbox.kernels.cuda import Launch, host_options, nvrtc, prebuild, record_launches
from sandbox.kernels.cuda.device import device_info
from sandbox.kernels.failures import described

Stage = Callable[[str], None]
BYTES_OF_A_CHECK = 20
"""Memory of a check over what a call moves: guarded copies, float64 results, differences."""


def import_variant_file(path: Path) -> None:
    """Import a file of the user's, whose decorators register variants.

    Ours are registered before, so that a name taken twice is the file's error.
    """
    name = f"variant_file_{path.stem}"
    if name in sys.modules:
        return
    for op in OPS.values():
        _ = op.variants
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def namespace(gpu: bool) -> Any:
    if not gpu:
        return np
    import cupy

    return cupy


def check(
    stage: Stage, op: str, variant: str, case: Case, gpu: bool, checked: bool = False
) -> dict[str, Any]:
    """One variant on one case against the oracle; `seconds` is host time for all of it.

    With `checked` the host runner uses its checked build, in a shuffled schedule.
    """
    stage(variant)
    operation = OPS[op]
    start = time.perf_counter()
    lack = _lacks_memory(operation.cost(case).bytes) if gpu else None
    if lack:
        return {"status": "UNAVAILABLE", "message": lack, "error": None, "seconds": None}
    seed = case.seed + 1 if checked else None
    with host_options(checked=checked, seed=seed, global_races=checked):
        outcome = conformance.run(operation, operation.variants[variant], case, namespace(gpu))
    return {
        "status": outcome.status,
        "message": outcome.message,
        "error": outcome.error,
        "seconds": None if outcome.status == "UNAVAILABLE" else time.perf_counter() - start,
    }


def _lacks_memory(bytes_moved: int) -> str | None:
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()
    free, needed = cupy.cuda.runtime.memGetInfo()[0], BYTES_OF_A_CHECK * bytes_moved
    if needed > free:
        return f"needs about {needed / 1e9:.1f} GB of GPU memory, {free / 1e9:.1f} GB are free"
    return None


def time_variants(
    stage: Stage, op: str, variants: list[str], case: Case, budget_s: float
) -> dict[str, Any]:
    """Times of checked variants on one case, launches interleaved; see `gpu_timing`."""
    from experiments import gpu_timing

    operation = OPS[op]
    chosen = [operation.variants[name] for name in variants]
    return gpu_timing.time_case(operation, chosen, case, budget_s, stage)


def gemm(stage: Stage) -> float:
    from experiments import gpu_work

    stage("gemm")
    return gpu_work.gemm_tflops()


def build(
    stage: Stage, op: str, variants: list[str], cases: list[Case], gpu: bool, checked: bool = False
) -> int:
    """Compile the CUDA kernels of these variants, in parallel, into the cache; returns how many.

    A case that cannot be prepared or a kernel that cannot be compiled is left for its check to
    report.
    """
    operation = OPS[op]
    kernels = [operation.variants[name] for name in variants]
    kernels = [v for v in kernels if v.kind == "cuda" and not v.unavailable(v.target(gpu))]
    launches = []
    for case in _smallest(operation, cases):
        try:
            arguments = conformance.prepare(operation, case, namespace(gpu))
        except Exception:
            continue
        for variant in kernels:
            with record_launches() as recorded:
                try:
                    operation(**arguments, variant=variant, check_values=False)
                except Exception:
                    continue
            launches += recorded
    return compile_ahead(stage, launches, gpu, checked)


def compile_ahead(stage: Stage, launches: list[Launch], gpu: bool, checked: bool = False) -> int:
    """Compile what recorded launches need, in parallel, into the cache; returns how many."""
    built = 0
    groups: dict[str, list[Launch]] = {}
    host = "host-checked" if checked else "host"
    for launch in launches:
        groups.setdefault(_architecture(launch.kernel) if gpu else host, []).append(launch)
    for target, group in groups.items():
        for each in prebuild(group, target=target):
            built += 1
            stage(f"compile {each.done}/{each.total}")
    return built


def _architecture(kernel: Any) -> str:
    return nvrtc.device_arch(device_info().cc, kernel.arch_specific)


def _smallest(operation: Any, cases: Iterable[Case]) -> list[Case]:
    """Of the cases that share dims, dtype and options, the cheapest: they share their kernels."""
    found: dict[Any, Case] = {}
    for case in sorted(cases, key=lambda case: operation.cost(case).bytes):
        found.setdefault((case.dims, case.dtype, repr(case.options)), case)
    return list(found.values())


def check_layer(stage: Stage, **arguments: Any) -> dict[str, Any]:
    """A whole layer's contender on one problem; see `layer_bench`."""
    from experiments import layer_bench

    return layer_bench.check(stage, **arguments)


def time_layers(stage: Stage, **arguments: Any) -> dict[str, Any]:
    """Times of a whole layer's contenders on one problem; see `layer_timing`."""
    from experiments import layer_timing

    return layer_timing.time_contenders(stage, **arguments)


TASKS = {
    "check": check,
    "time": time_variants,
    "gemm": gemm,
    "build": build,
    "vectors": check_variant,
    "check_layer": check_layer,
    "time_layers": time_layers,
}


def _poisoned() -> bool:
    """Whether this process's CUDA context is of no more use."""
    if "cupy" not in sys.modules:
        return False
    import cupy

    try:
        if not cupy.cuda.runtime.getDeviceCount():
            return False
    except Exception:
        return False
    try:
        cupy.cuda.runtime.deviceSynchronize()
        return int(cupy.arange(3).sum()) != 3
    except Exception:
        return True


def serve(tasks: Any, answer: Callable[[dict[str, Any]], None]) -> None:
    """Answer tasks until there are no more or the CUDA context is lost."""
    while True:
        try:
            name, arguments = pickle.load(tasks)
        except EOFError:
            return
        try:
            result = TASKS[name](lambda stage: answer({"stage": stage}), **arguments)
            suspect = isinstance(result, dict) and result.get("status") == "ERROR"
            reply = {"done": result, "poisoned": suspect and _poisoned()}
        except Exception as failure:
            reply = {"failed": _describe(failure), "poisoned": _poisoned()}
            reply["variant"] = getattr(failure, "variant", None)
        answer(reply)
        if reply["poisoned"]:
            return


def _describe(failure: Exception) -> str:
    cause = failure.__cause__ if isinstance(failure, VariantFailed) else failure
    return described(cause)


def main() -> None:
    faulthandler.enable()
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        channel.write(json.dumps(jsonable(message), allow_nan=False) + "\n")
        channel.flush()

    try:
        for path in pickle.load(sys.stdin.buffer):
            import_variant_file(path)
        for operation in OPS.values():
            len(operation.variants)  # imports the files
    except Exception:
        answer({"failed": traceback.format_exc(), "variant": None, "poisoned": True})
        return
    answer({"done": None, "poisoned": False})
    serve(sys.stdin.buffer, answer)


if __name__ == "__main__":
    main()
