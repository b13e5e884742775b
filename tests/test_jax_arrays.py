"""JAX arrays in the array bridge: shared as they are, results made only once written."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from sandbox import arrays
from sandbox.arrays import DTYPES, adopt, borrow, exporter

jax = pytest.importorskip("jax", reason="JAX is not installed")

JAX_NAMES = ["float32", "float16", "bfloat16", "uint8", "int32", "float8_e4m3fn", "float8_e5m2"]


def jax_array(name, shape=(3, 5)):
    size = int(np.prod(shape, dtype=int))
    return (jax.numpy.arange(size) % 50 + 1).astype(name).reshape(shape)


@pytest.mark.parametrize("name", JAX_NAMES)
@pytest.mark.parametrize("shape", [(3, 5), (), (0, 4)])
def test_jax_shares_bits(name, shape):
    source = jax_array(name, shape)
    array = adopt(source, "q")
    assert array.ctypes.data == source.unsafe_buffer_pointer()
    assert (array.shape, array.dtype) == (shape, DTYPES.get(name, np.dtype(np.uint8)))
    assert array.tobytes() == np.array(source).tobytes()
    with pytest.raises(ValueError, match="q: the array is read-only"):
        arrays.require_writeable(array, "q")
    with pytest.raises(ValueError, match="q: a JAX array cannot change"):
        arrays.require_writeable(source, "q")


@pytest.mark.parametrize("name", JAX_NAMES)
def test_jax_memory_outlives_the_array(name):
    source = jax_array(name, (64, 33))
    array = adopt(source)
    expected = array.copy()
    del source
    gc.collect()
    clutter = [jax.numpy.full((64, 33), 99, name) for _ in range(20)]
    assert array.tobytes() == expected.tobytes()
    assert len(clutter) == 20


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "uint8", "int32"])
@pytest.mark.parametrize("shape", [(7, 5), (), (0, 4), 3])
def test_jax_kind_finishes_over_the_written_memory(name, shape):
    with borrow({"q": jax_array("bfloat16"), "k": np.zeros(3)}) as borrowed:
        kind = borrowed.kind
        buffer, result = kind.empty(shape, DTYPES[name])
        assert (buffer.dtype, buffer.flags.writeable) == (DTYPES[name], True)
        buffer[...] = 5
        result = kind.finish(buffer, result)
    assert isinstance(result, jax.Array)
    assert (result.shape, result.dtype) == (buffer.shape, DTYPES[name])
    assert result.size == 0 or result.unsafe_buffer_pointer() == buffer.ctypes.data
    del buffer
    gc.collect()
    assert (np.asarray(result) == 5).all()


def test_jax_refusals():
    with pytest.raises(TypeError, match="q: a JAX tracer has no memory"):
        jax.jit(lambda x: adopt(x, "q"))(jax.numpy.ones(3))
    deleted = jax.numpy.ones(3)
    deleted.delete()
    with pytest.raises(TypeError, match="q: this JAX array is deleted"):
        adopt(deleted, "q")
    with pytest.raises(TypeError, match="set jax_enable_x64"):
        exporter(jax.numpy.ones(3)).export(np.zeros(3, np.int64))
