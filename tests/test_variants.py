"""How an op finds its variants, and what they say of arguments."""

import importlib
import threading

import numpy as np
import pytest

from sandbox.kernels import conformance, linear, op
from sandbox.kernels.op import Variant


def test_a_thread_sees_all_variants_or_waits(monkeypatch):
    """Ranks in one process all ask for the first time at once."""
    assert len(linear.variants) > 1
    inside, go = threading.Event(), threading.Event()

    def slowly(name):
        inside.set()
        assert go.wait(20)
        return importlib.import_module(name)

    monkeypatch.setattr(linear, "_discovered", False)
    monkeypatch.setattr(op, "importlib", type("", (), {"import_module": staticmethod(slowly)}))
    first, second = (threading.Thread(target=lambda: linear.variants) for _ in range(2))
    first.start()
    assert inside.wait(20)
    second.start()
    second.join(0.1)
    waits = second.is_alive()
    go.set()
    first.join(20)
    second.join(20)
    assert waits
    assert not second.is_alive()


@pytest.mark.parametrize("answer", [True, False, 3, ""])
def test_what_is_neither_a_reason_nor_none_is_an_error(answer):
    """A reader may take True for "yes", which it is not: it is no reason."""
    variant = Variant(linear, "odd", "numpy", lambda **_: None, supports=lambda **_: answer)
    with pytest.raises(TypeError, match=f"linear variant 'odd': supports returned {answer!r}"):
        variant.refuses({})
    case = next(iter(linear.cases("conformance")))
    found = conformance.run(linear, variant, case, np)
    assert found.status == "ERROR"
    assert "test_variants.py" not in found.message


def test_a_failure_is_said_with_its_place():
    def broken(**arguments):
        return arguments["x"].no_such_thing

    case = next(iter(linear.cases("conformance")))
    for where in ({"run": broken}, {"run": lambda **_: None, "supports": broken}):
        found = conformance.run(linear, Variant(linear, "broken", "numpy", **where), case, np)
        assert found.status == "ERROR"
        assert "no_such_thing" in found.message
        assert "(test_variants.py:" in found.message
        assert "in broken)" in found.message


def test_a_missing_argument_is_said_with_the_op():
    with pytest.raises(TypeError, match="linear: missing a required argument: 'weight'"):
        linear(np.ones((2, 3), np.float32))
