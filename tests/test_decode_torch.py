"""Decode attention of PyTorch's tensors."""

import numpy as np
import pytest
from attention_problems import (
    POISON,
    TINY,
    decode_problem,
    fast_decode,
    paged,
)

from sandbox.arrays import DTYPES
from sandbox.kernels import decode_attention

L, E = TINY.L, TINY.E


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@fast_decode
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_tensors_give_the_results_of_arrays(torch, attend, name):
    if attend.target == "gpu":
        pytest.skip("tensors of this test are on the CPU")
    problem = decode_problem([9, 0, 5], DTYPES[name], tokens=2) | {"return_key_mass": True}
    problem |= {"sink": np.zeros(TINY.N, np.float32)}
    want = attend(**problem)
    tensors = {
        key: torch.from_numpy(value.astype(np.float32)).to(getattr(torch, name))
        if key in ("q", "cache")
        else torch.from_numpy(value)
        for key, value in problem.items()
        if isinstance(value, np.ndarray)
    }
    tensors["cache"] = torch.nn.Parameter(tensors["cache"])
    found = attend(**problem | tensors)
    assert [each.dtype for each in found] == [getattr(torch, name), *2 * [torch.float32]]
    for got, other in zip(found, want):
        np.testing.assert_array_equal(got.float().numpy(), other.astype(np.float32))
    wide = torch.full((3, 2, TINY.N, L + 8), POISON, dtype=getattr(torch, name))
    given = wide[..., :L]
    out, _, mass = attend(**problem | tensors, out=given)
    assert out is given
    assert torch.equal(wide[..., :L], found[0])
    assert (wide[..., L:] == POISON).all()
    assert torch.equal(mass, found[2])


def test_codes_of_torch(torch):
    problem = decode_problem([9])
    rows = np.random.default_rng(0).standard_normal((9, E), np.float32)
    pages = paged([rows], 4)
    codes = torch.from_numpy(np.nan_to_num(pages["cache"])).to(torch.float8_e4m3fn)
    said = {"cache_format": "fp8_e4m3", "k_scale": torch.tensor(0.5)}
    out, lse = decode_attention(**problem | pages | said | {"cache": codes})
    values = codes.float().numpy() * np.float32(0.5)
    want, want_lse = decode_attention(**problem | pages | {"cache": values})
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(lse, want_lse)
