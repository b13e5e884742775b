"""Prints what the PTX of Numba kernels should not hold, as JSON: `{kernel: [lines]}`.

`python tests/numba_ptx.py OP:PART...` compiles, for sm_90 and without a GPU, each Numba variant of
each op for the first bfloat16 case whose name holds PART. Lines with double precision count, and
those with a stack. Exits with "cannot compile: " and a reason where Numba has no NVVM.
"""

import json
import os
import re
import sys
import warnings
from types import SimpleNamespace

os.environ["NUMBA_ENABLE_CUDASIM"] = "0"

import numpy as np

CC = (9, 0)
UNWANTED = re.compile(r"\.f64|%fd|__local_depot")


def compiler():
    """A stand-in for `numba_target.launch` that compiles, and the dict that it fills."""
    from numba import cuda, typeof
    from numba.cuda import dispatcher, types
    from numba.cuda.np import numpy_support

    from sandbox import arrays
    from sandbox.kernels import numba_target

    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=CC)
    found = {}

    def kind(value):
        if not arrays.is_array(value):
            return typeof(value)
        value = numba_target.bits(value)
        return types.Array(numpy_support.from_dtype(value.dtype), value.ndim, "A")

    def launch(kernel, grid, block, *arguments):
        ptx, _ = cuda.compile_ptx(kernel.py_func, tuple(map(kind, arguments)), cc=CC)
        lines = [line.strip() for line in ptx.splitlines() if UNWANTED.search(line)]
        found[f"{launch.name} {kernel.py_func.__name__}"] = lines

    numba_target.launch = launch
    return launch, found


def main(wanted):
    from numba.cuda.cudadrv import nvvm

    try:
        nvvm.NVVM()
    except Exception as failure:
        sys.exit(f"cannot compile: no NVVM ({failure})")
    from sandbox.kernels import OPS, conformance

    warnings.simplefilter("ignore")
    launch, found = compiler()
    for name, _, part in (entry.partition(":") for entry in wanted):
        op = OPS[name]
        cases = op.cases("conformance")
        case = next(c for c in cases if part in c.name and c.dtype.name == "bfloat16")
        arguments = conformance.checked_arguments(op, conformance.prepare(op, case, np))
        for variant in op.variants.values():
            if variant.kind == "numba" and not variant.refuses(arguments):
                launch.name = f"{name} {variant.name} {case.name}"
                variant.run(**arguments)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
