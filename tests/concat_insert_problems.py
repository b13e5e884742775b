"""Small calls of the inserts, and their variants on this machine's CPU."""

import numpy as np
import pytest
from variants_here import all_here

from sandbox.dims import PRESETS
from sandbox.kernels.case import Case, Workload
from sandbox.kernels.conformance import bits_of


def every_variant(*ops, **kinds):
    return pytest.mark.parametrize(("op", "variant"), all_here(*ops, **kinds))


def problem(op, dtype=np.float32, dims="tiny", tokens=(2, 1), context=(7, 0), **options):
    """A small call: its arguments, outputs left out. Dims all differ; positions are not 0."""
    workload = Workload("few", context, tokens)
    options = {"block_size": 4, **options}
    case = Case(PRESETS.get(dims, dims), "dims", np.dtype(dtype), workload, options)
    return op.make_inputs(case, np)


def same_bits(left, right):
    return left.shape == right.shape and bool((bits_of(left) == bits_of(right)).all())
