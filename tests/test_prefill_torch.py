"""Prefill attention of PyTorch's tensors."""

import numpy as np
import pytest
from attention_problems import (
    POISON,
    fast_prefill,
    prefill_problem,
)

from sandbox.arrays import DTYPES, bfloat16
from sandbox.kernels import prefill_attention


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@fast_prefill
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_tensors_give_the_results_of_arrays(torch, attend, name):
    if attend.target == "gpu":
        pytest.skip("tensors of this test are on the CPU")
    problem = prefill_problem([3, 2], [4, 2], DTYPES[name])
    want, want_lse = attend(**problem)
    tensors = {
        key: torch.from_numpy(value.astype(np.float32)).to(getattr(torch, name))
        if key in "qkv"
        else torch.from_numpy(value)
        for key, value in problem.items()
        if isinstance(value, np.ndarray)
    }
    tensors["k"] = torch.nn.Parameter(tensors["k"])
    out, lse = attend(**problem | tensors)
    assert isinstance(out, torch.Tensor)
    assert isinstance(lse, torch.Tensor)
    assert out.dtype == getattr(torch, name)
    assert lse.dtype == torch.float32
    np.testing.assert_array_equal(out.float().numpy(), want.astype(np.float32))
    np.testing.assert_array_equal(lse.numpy(), want_lse)
    wide = torch.full((5, 2, 24), POISON, dtype=getattr(torch, name))
    given = wide[..., :16]
    assert attend(**problem | tensors, out=given, return_lse=False) is given
    assert torch.equal(wide[..., :16], out)
    assert (wide[..., 16:] == POISON).all()


def test_codes_of_torch(torch):
    problem = prefill_problem([3], [3]) | {"out_dtype": "float32"}
    scales = {f"{name}_descale": torch.tensor(1.0) for name in "qkv"}
    codes = {name: torch.from_numpy(problem[name]).to(torch.float8_e4m3fn) for name in "qkv"}
    values = {name: tensor.float().numpy() for name, tensor in codes.items()}
    out, lse = prefill_attention(**problem | codes | scales)
    want, want_lse = prefill_attention(**problem | values)
    np.testing.assert_array_equal(out.numpy(), want)
    np.testing.assert_array_equal(lse.numpy(), want_lse)


def test_dtypes_of_torch(torch):
    problem = prefill_problem([3], [3])
    assert prefill_attention(**problem, out_dtype=torch.bfloat16)[0].dtype == bfloat16
